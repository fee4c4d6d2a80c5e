"""Gradients whose formulas in eager look at values, which fake tensors do not have. While tracing, PyTorch uses other
formulas, whose last bits differ. The operators here look at the values when they run.

The gradient of a product of elements is a quotient if no element is 0. The gradient of a number that ``masked_fill``
fills in is the sum of the selected gradients, without zeros among the terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lowtide_value_gradients"
_ROOM = 4  # bytes that ``_others`` takes, as a multiple of the data's


def _others(data: Tensor, dim: int | None) -> Tensor:
    """For each element, the product of the others."""
    if dim is None:
        return _others(data.contiguous().view(-1), 0).view_as(data)
    size = data.shape[dim]
    ones = torch.ones_like(data.narrow(dim, 0, 1))
    before = torch.cat([ones, data.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([ones, data.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


def _of_product(arrived: Tensor, data: Tensor, result: Tensor, dim: int | None) -> Tensor:
    """The gradient of ``data``. ``arrived`` and ``result`` have size 1 in dimension ``dim``, or no dimensions if all
    elements are multiplied."""
    others = result / data
    data.new_empty((_ROOM, *data.shape))  # so that plans have room for either formula
    zeros = int((data == 0).sum())
    if zeros > 1 and dim is None:
        return others.zero_()
    if zeros:
        others.copy_(_others(data, dim))
    return arrived * others.conj()


def _fake_of_product(arrived: Tensor, data: Tensor, result: Tensor, dim: int | None) -> Tensor:
    return arrived * (result / data).conj()


def _of_number(arrived: Tensor, mask: Tensor) -> Tensor:
    # So that plans have room for any number of selected elements, and for their indices: threads share two, accelerators take
    # one for each dimension.
    places = arrived.dim() if arrived.device.type != "cpu" else 2 if torch.get_num_threads() > 1 else 0
    arrived.new_empty((arrived.numel() * (arrived.element_size() + 8 * places),), dtype=torch.uint8)
    return arrived.masked_select(mask).sum()


def _traced_of_number(arrived: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, arrived, 0).sum()


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _operator(name: str, given: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    _LIBRARY.define(f"{name}({given}) -> Tensor")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_OF_PRODUCT = _operator(
    "product", "Tensor arrived, Tensor data, Tensor result, int? dim", _of_product, _fake_of_product
)
_OF_NUMBER = _operator("number", "Tensor arrived, Tensor mask", _of_number, _traced_of_number)


class Product(torch.autograd.Function):
    """``apply(data, dim, keepdim)``. ``dim`` is ``None`` to multiply all elements."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        result = data.prod() if dim is None else data.prod(dim, keepdim)
        ctx.save_for_backward(data, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None, None]:
        (data, result), dim = ctx.saved_tensors, ctx.dim
        if dim is not None and not ctx.keepdim:
            arrived, result = arrived.unsqueeze(dim), result.unsqueeze(dim)
        if torch.is_grad_enabled():  # it is differentiated again
            return arrived * _others(data, dim).conj(), None, None
        return _OF_PRODUCT(arrived, data, result, dim), None, None


class Filled(torch.autograd.Function):
    """``apply(data, mask, number)``, for a number that gets a gradient."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mask: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return data.masked_fill(mask, number)

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor | None, None, Tensor]:
        (mask,) = ctx.saved_tensors
        of_number = _traced_of_number if torch.is_grad_enabled() else _OF_NUMBER  # it is differentiated again
        return arrived.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None, None, of_number(arrived, mask)

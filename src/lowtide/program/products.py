"""Gradients of products of elements, which eager computes by one of two formulas: by a quotient where no element is 0.

PyTorch looks at the elements for that, which fake tensors have none of, so while it traces it always takes the other formula,
whose last bits differ. ``GRADIENT`` looks when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lowtide_products"
_ROOM = 4  # times the data, which ``_others`` takes


def _others(data: Tensor, dim: int | None) -> Tensor:
    """For each element, the product of the others."""
    if dim is None:
        return _others(data.contiguous().view(-1), 0).view_as(data)
    size = data.shape[dim]
    ones = torch.ones_like(data.narrow(dim, 0, 1))
    before = torch.cat([ones, data.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([ones, data.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


def _gradient(arrived: Tensor, data: Tensor, result: Tensor, dim: int | None) -> Tensor:
    """Of ``data``. ``arrived`` and ``result`` have a dimension of size 1 in the place of ``dim``, or none where all are
    multiplied."""
    others = result / data
    data.new_empty((_ROOM, *data.shape))  # so that plans have room for either formula
    zeros = int((data == 0).sum())
    if zeros > 1 and dim is None:
        return others.zero_()
    if zeros:
        others.copy_(_others(data, dim))
    return arrived * others.conj()


def _fake(arrived: Tensor, data: Tensor, result: Tensor, dim: int | None) -> Tensor:
    return arrived * (result / data).conj()


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("gradient(Tensor arrived, Tensor data, Tensor result, int? dim) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("gradient", _gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(f"{NAMESPACE}::gradient", _fake, lib=_LIBRARY)
GRADIENT = torch.ops.lowtide_products.gradient.default


class Product(torch.autograd.Function):
    """``apply(data, dim, keepdim)``; all elements are multiplied where ``dim`` is ``None``."""

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
        return GRADIENT(arrived, data, result, dim), None, None

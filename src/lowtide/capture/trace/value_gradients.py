"""While a model is traced, replace functions whose gradients depend on values that eager looks at (see
``program.value_gradients``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.program.value_gradients import Filled, Product


def with_value_gradient(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result of such a function, computed by its replacement; ``None`` for any other function."""
    applied: Callable[..., Tensor | None] | None = _FUNCTIONS.get(function)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func
    if applied is None or transformed or not torch.is_grad_enabled():
        return None
    return applied(*args, **kwargs)


def _product(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None
) -> Tensor | None:
    known = out is None and (dim is None or type(dim) is int) and input.requires_grad and input.layout is torch.strided
    if not known or not input.dim() or torch.is_autocast_enabled(input.device.type):
        return None
    data = input if dtype is None else input.to(dtype)
    return Product.apply(data, None if dim is None else dim % data.dim(), keepdim) if data.requires_grad else None  # type: ignore[no-untyped-call]


def _filled(input: Tensor, mask: Tensor, value: Any) -> Tensor | None:
    known = isinstance(value, Tensor) and value.requires_grad and input.layout is torch.strided
    return Filled.apply(input, mask, value) if known else None  # type: ignore[no-untyped-call]


def _filled_in_place(input: Tensor, mask: Tensor, value: Any) -> Tensor | None:
    filled = _filled(input, mask, value)
    return None if filled is None else input.copy_(filled)


_FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {
    torch.prod: _product,
    Tensor.prod: _product,
    torch.masked_fill: _filled,
    Tensor.masked_fill: _filled,
    Tensor.masked_fill_: _filled_in_place,
}

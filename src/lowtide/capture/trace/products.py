"""Products of elements while a model is traced: their gradients as eager computes them, see ``program.products``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.program.products import Product

_FUNCTIONS = (torch.prod, Tensor.prod)


def product(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What a product of elements that gets a gradient stands for; ``None`` for any other call of PyTorch's functions."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by ``torch.func``
    if function not in _FUNCTIONS or transformed or not torch.is_grad_enabled():
        return None
    return _applied(*args, **kwargs)


def _applied(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Any = None
) -> Tensor | None:
    known = out is None and (dim is None or type(dim) is int) and input.requires_grad and input.layout is torch.strided
    if not known or not input.dim() or torch.is_autocast_enabled(input.device.type):
        return None
    data = input if dtype is None else input.to(dtype)
    return Product.apply(data, None if dim is None else dim % data.dim(), keepdim) if data.requires_grad else None  # type: ignore[no-untyped-call]

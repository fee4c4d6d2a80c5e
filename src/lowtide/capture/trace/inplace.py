"""In-place operators on tensors that are laid out in another order (channels last, a transposed copy).

A captured program is functional, and the functional form of some operators returns a tensor in the common layout, where eager's
in-place one keeps that of the tensor it writes to: what runs next would have another layout, and random numbers be drawn in
another order. While tracing, such a call is replaced by one that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.capture.trace.fake import is_empty
from lowtide.program import layouts

_ATEN = torch.ops.aten
_COPIED_BACK = {
    _ATEN.addbmm_,
    _ATEN.addmm_,
    _ATEN.addmv_,
    _ATEN.addr_,
    _ATEN.baddbmm_,
    _ATEN.cumprod_,
    _ATEN.cumsum_,
    _ATEN.index_add_,
    _ATEN.index_copy_,
    _ATEN.index_reduce_,
    _ATEN.masked_scatter_,
    _ATEN.renorm_,
    _ATEN.scatter_,
    _ATEN.scatter_add_,
    _ATEN.scatter_reduce_,
    _ATEN.tril_,
    _ATEN.triu_,
}
_CONCERNED = _COPIED_BACK | {_ATEN.masked_fill_, _ATEN.bernoulli_}


def keeping_layouts(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``FunctionalTensorMode.__torch_dispatch__``, with these operators replaced."""

    def run(mode: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        packet, kwargs = getattr(func, "overloadpacket", None), kwargs or {}
        if packet not in _CONCERNED or not _is_reordered(args[0]):
            return dispatch(mode, func, types, args, kwargs)
        if packet is _ATEN.bernoulli_:
            if is_empty(torch._from_functional_tensor(args[0].elem)):  # see targets.bernoulli
                return dispatch(mode, func, types, args, kwargs)
            with mode:
                empty = torch.empty_like(args[0])
            filled = dispatch(mode, func, types, (empty, *args[1:]), kwargs)
            with mode:
                return args[0].copy_(filled)
        with mode:
            if packet is _ATEN.masked_fill_:
                return _in_memory_order(func, args, kwargs)
            functional = getattr(_ATEN, func._schema.name.removeprefix("aten::").removesuffix("_"))
            return args[0].copy_(getattr(functional, func._overloadname)(*args, **kwargs))

    return run


def _is_reordered(tensor: Any) -> bool:
    """Whether it fills its memory, in another order than that of its dimensions."""
    reordered = isinstance(tensor, FunctionalTensor) and not tensor.is_contiguous()
    return reordered and layouts.is_dense(tensor.shape, tensor.stride())


def _in_memory_order(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """``func``, which does the same to each element, on its tensors in the order in memory of the one that is written to."""
    written: Tensor = args[0]
    order = layouts.memory_order(written.shape, written.stride())
    others = [
        value.expand(written.shape).permute(order) if isinstance(value, Tensor) and value.dim() > 0 else value
        for value in args[1:]
    ]
    func(written.permute(order), *others, **kwargs)
    return written

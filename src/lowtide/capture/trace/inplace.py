"""In-place operators on tensors with an uncommon layout (channels last, a transposed copy), or with gaps between rows.

A captured program is functional. The functional form of some operators returns the common layout, while eager's
in-place operator keeps the layout of the tensor that it writes: later operators would see another layout, and random
numbers would be drawn in another order. So while tracing, such a call is replaced by one that keeps the layout. For
rows with gaps in memory (a gate of a GRU) the functional form returns rows without gaps, and kernels that process
several elements at once would round differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_EXACT = {  # the same bits however many elements a kernel processes at once
    _ATEN.abs_, _ATEN.add_, _ATEN.bernoulli_, _ATEN.clamp_, _ATEN.clamp_max_, _ATEN.clamp_min_, _ATEN.copy_, _ATEN.div_,
    _ATEN.fill_, _ATEN.masked_fill_, _ATEN.mul_, _ATEN.neg_, _ATEN.relu_, _ATEN.sqrt_, _ATEN.sub_, _ATEN.zero_,
}  # fmt: skip
_CONCERNED = _COPIED_BACK | {_ATEN.masked_fill_, _ATEN.bernoulli_}


def keeping_layouts(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run these operators under the functional ``mode`` so that they keep layouts."""
    packet = getattr(func, "overloadpacket", None)
    if packet is not None and _is_apart(func, args):
        return _in_rows(func, args, kwargs, mode)
    if packet not in _CONCERNED or not _is_reordered(args[0]):
        return NotImplemented
    with mode:
        if packet is _ATEN.bernoulli_:
            if is_empty(torch._from_functional_tensor(args[0].elem)):  # see targets.bernoulli
                return NotImplemented
            return args[0].copy_(func(torch.empty_like(args[0]), *args[1:], **kwargs))
        if packet is _ATEN.masked_fill_:
            return _in_memory_order(func, args, kwargs)
        return args[0].copy_(_functional(func)(*args, **kwargs))


def _is_apart(func: Any, args: Sequence[Any]) -> bool:
    """Whether eager's kernel gets rows with gaps in memory where the functional value has none. This happens for parts
    of ``unsafe_split`` that were written, which autograd does not treat as views."""
    if torch.Tag.pointwise not in func.tags or not func._schema.is_mutable or func.overloadpacket in _EXACT:
        return False
    tensor = args[0] if args else None
    if not isinstance(tensor, FunctionalTensor) or layouts.is_dense(tensor.shape, tensor.stride()):
        return False
    return bool(torch._from_functional_tensor(tensor.elem).is_contiguous())


def _in_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> Any:
    """Run ``func`` on rows with a gap behind each, so that kernels that process several elements at once group the same
    ones."""
    written = args[0]
    strides = zip(written.stride(), layouts.contiguous_strides(written.shape), strict=True)
    dim = max((dim for dim, (own, dense) in enumerate(strides) if own != dense), default=0) + 1
    dim = min(dim, written.dim() - 1)
    with mode:
        behind = [0, 0] * (written.dim() - 1 - dim) + [0, 1]
        rows = torch.constant_pad_nd(written, behind).narrow(dim, 0, written.shape[dim])
        result = _functional(func)(rows, *args[1:], **kwargs)
    torch._functionalize_replace(written.elem, torch._from_functional_tensor(result.elem))
    torch._functionalize_commit_update(written.elem)
    return written


def _functional(func: Any) -> Any:
    return getattr(getattr(_ATEN, func._schema.name.removeprefix("aten::").removesuffix("_")), func._overloadname)


def _is_reordered(tensor: Any) -> bool:
    """Whether the tensor fills its memory, but not in the order of its dimensions."""
    reordered = isinstance(tensor, FunctionalTensor) and not tensor.is_contiguous()
    return reordered and layouts.is_dense(tensor.shape, tensor.stride())


def _in_memory_order(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run an elementwise ``func`` on its tensors in the memory order of the one that is written."""
    written: Tensor = args[0]
    order = layouts.memory_order(written.shape, written.stride())
    others = [
        value.expand(written.shape).permute(order) if isinstance(value, Tensor) and value.dim() > 0 else value
        for value in args[1:]
    ]
    func(written.permute(order), *others, **kwargs)
    return written

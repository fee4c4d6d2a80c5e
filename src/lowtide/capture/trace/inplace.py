"""In-place operators on tensors that are laid out in another order (channels last, a transposed copy), or in rows apart.

A captured program is functional, and the functional form of some operators returns a tensor in the common layout, where eager's
in-place one keeps that of the tensor it writes to: what runs next would have another layout, and random numbers be drawn in
another order. While tracing, such a call is replaced by one that keeps it. Of rows that are apart in memory (a gate of a
GRU) the functional form makes rows that are not, and a function that takes some elements at a time would round otherwise.
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
_EXACT = {  # however many elements a kernel takes at a time
    _ATEN.abs_, _ATEN.add_, _ATEN.bernoulli_, _ATEN.clamp_, _ATEN.clamp_max_, _ATEN.clamp_min_, _ATEN.copy_, _ATEN.div_,
    _ATEN.fill_, _ATEN.masked_fill_, _ATEN.mul_, _ATEN.neg_, _ATEN.relu_, _ATEN.sqrt_, _ATEN.sub_, _ATEN.zero_,
}  # fmt: skip
_CONCERNED = _COPIED_BACK | {_ATEN.masked_fill_, _ATEN.bernoulli_}


def keeping_layouts(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs these operators under the functional ``mode``."""
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
    """Whether eager's kernel is given rows that do not follow each other in memory, where those of the functional value do. So
    it is with parts of ``unsafe_split`` that have been written into: they are no views to autograd."""
    if torch.Tag.pointwise not in func.tags or not func._schema.is_mutable or func.overloadpacket in _EXACT:
        return False
    tensor = args[0] if args else None
    if not isinstance(tensor, FunctionalTensor) or layouts.is_dense(tensor.shape, tensor.stride()):
        return False
    return bool(torch._from_functional_tensor(tensor.elem).is_contiguous())


def _in_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> Any:
    """``func`` on rows with a gap behind each: an operator that takes several elements at a time takes the same ones."""
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

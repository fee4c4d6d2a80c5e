"""A cache of fake kernels' results, by operator and layouts of arguments.

PyTorch has such a cache too, but a lookup there takes longer than most fake kernels, because its keys hold everything
that may matter to any operator. This one is only for ATen operators that write nothing, on strided tensors. With
symbolic sizes, results are kept for one trace, since their expressions have a meaning only there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.trace.real_strides import tensors_among
from lowtide.capture.trace.sizes import hint, hints
from lowtide.program.layouts import copies_storage, memory_of, span_elements

PLAIN = frozenset(
    {bool, complex, float, int, str, torch.device, torch.dtype, torch.layout, torch.memory_format, type(None)}
)
_MOST = 1 << 14
_KNOWN: dict[Any, Any] = {}  # results for sizes that are numbers
_LIFTED = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default}
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


def writes_nothing(func: Any) -> bool:
    """Whether ``func`` is a dispatcher operator (``aten::size`` is not) that writes into none of its arguments."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return False
    return bool(torch._C._dispatch_has_kernel(func.name()))  # type: ignore[no-untyped-call]


def is_composite(func: Any) -> bool:
    """Whether ``func`` is made of other operators, and autograd sees those."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


class _Kept(NamedTuple):
    """Describes a result: a tensor with new memory or, with an ``offset``, a view of the only tensor argument. ``shared``:
    the result is the same tensor as this earlier result."""

    shape: tuple[int | torch.SymInt, ...]
    strides: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt | None
    dtype: torch.dtype
    device: torch.device
    shared: int | None = None


class _UnkeptError(Exception):
    """Raised for arguments or results that are not cached."""


def key_of(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The cache key of a call; ``None`` if its result is not cached."""
    if not _is_kept(func) or next(tensors_among((*kwargs.values(),)), None) is not None:
        return None
    try:
        key = [func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        key += [torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()]  # convolutions choose layouts by these
        key.extend(_key(mode, one) for one in args)
        key.extend((name, _key(mode, one)) for name, one in kwargs.items())
    except _UnkeptError:
        return None
    return tuple(key)


def keep(mode: Any, key: Any, args: Sequence[Any], result: Any) -> None:
    """Cache the ``result`` of a fake kernel, if it consists of tensors."""
    try:
        found = _kept(result, [*map(memory_of, tensors_among(args))], [])
    except _UnkeptError:
        return
    if not _is_alike(_made(mode, found, args, []), result):
        return
    kept = _table(mode)
    if len(kept) >= _MOST:
        kept.clear()
    kept[key] = found


def known(mode: Any, key: Any, args: Sequence[Any]) -> Any:
    """A new copy of the cached result; ``None`` without one."""
    found = _table(mode).get(key)
    return None if found is None else _made(mode, found, args, [])


def _table(mode: Any) -> dict[Any, Any]:
    return _KNOWN if mode.shape_env is None else mode.kept_results


@functools.lru_cache(maxsize=1 << 12)
def _is_kept(func: Any) -> bool:
    if not writes_nothing(func) or func.namespace != "aten":
        return False
    if func in _LIFTED or copies_storage(func) or any(tag in func.tags for tag in _TAGS):
        return False
    aliases = [one.alias_info is not None for one in func._schema.returns]
    return not any(aliases) or (aliases == [True] and bool(func.is_view) and not is_composite(func))


def _key(mode: Any, value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.fake_mode is not mode or not _is_plain(value):
            raise _UnkeptError
        shape, strides, offset = value.shape, value.stride(), value.storage_offset()
        if value._has_symbolic_sizes_strides:
            shape, strides, offset = tuple(map(_size, shape)), tuple(map(_size, strides)), _size(offset)
        return shape, strides, offset, value.dtype, value.fake_device
    if kind in PLAIN:
        return kind, value
    if kind is torch.SymInt:
        return kind, _size(value)
    if kind is list or kind is tuple:
        return kind, *(_key(mode, one) for one in value)
    raise _UnkeptError


def _size(size: int | torch.SymInt) -> Any:
    """A size that is a number, or the expression of a symbolic one."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


def _is_plain(fake: FakeTensor) -> bool:
    return fake.layout is torch.strided and fake.constant is None and not fake.is_conj() and not fake.is_neg()


def _kept(result: Any, given: list[int], made: list[Any]) -> _Kept | tuple[_Kept | None, ...]:
    """Describe a result. ``given``: the memories of the arguments. ``made``: the results so far; this one is added."""
    if isinstance(result, tuple):
        return tuple(None if one is None else _kept(one, given, made) for one in result)  # type: ignore[misc]
    if type(result) is not FakeTensor or not _is_plain(result) or result.requires_grad:
        raise _UnkeptError
    memory = memory_of(result)
    shows = memory in given  # also for ``_unsafe_view``, whose schema does not say so
    # PyTorch's own cache forgets that two results are the same tensor.
    shared = next((number for number, one in enumerate(made) if one is result), None)
    if (shared is None and memory in map(memory_of, made)) or (shows and len(given) > 1):
        raise _UnkeptError
    shape, strides, offset = tuple(result.shape), result.stride(), result.storage_offset()
    elements = span_elements(hints(shape), hints(strides))
    if not shows and (hint(offset) != 0 or hint(result.untyped_storage().nbytes()) != elements * result.itemsize):
        raise _UnkeptError
    made.append(result)
    return _Kept(shape, strides, offset if shows else None, result.dtype, result.fake_device, shared)


def _made(mode: Any, found: Any, args: Sequence[Any], before: list[FakeTensor]) -> Any:
    if found is None:
        return None
    if type(found) is tuple:
        return tuple(_made(mode, one, args, before) for one in found)
    if found.shared is not None:
        before.append(before[found.shared])
        return before[-1]
    unasked = contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()
    with unasked:
        made = torch.empty_strided(found.shape, found.strides, dtype=found.dtype, device="meta")
        if found.offset is not None:
            shown = next(tensors_among(args))
            made.set_(shown.untyped_storage(), found.offset, found.shape, found.strides)
    before.append(FakeTensor(mode, made, found.device))
    return before[-1]


def _is_alike(made: Any, result: Any) -> bool:
    """Whether both have the same dispatch keys."""
    if isinstance(result, tuple):
        return all(_is_alike(*pair) for pair in zip(made, result, strict=True))
    return result is None or torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(result)

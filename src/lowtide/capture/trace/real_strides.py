"""The layouts that operators really return.

Shapes and types of a captured program come from PyTorch's fake kernels, and so do strides. But for some operators
(batch normalization, the backward of layer normalization and of losses) the fake kernel returns other strides than the
real one if an input has an uncommon layout. Strides decide which kernels run next, and whether a view exists. So an
operator with such an input is run for real, once for all calls with the same layouts, and its fake results get the real
strides. This includes views: a fake view may have another stride in a dimension of size 1, which decides whether a
convolution takes it for channels last.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from lowtide.capture.trace.sizes import hint, hints, in_symbols
from lowtide.program import generators
from lowtide.program.layouts import contiguous_strides

# Operators that return the common layout, as their fake kernels say.
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}
_REFUSING = {torch.ops.aten.multinomial.default}  # weights of zero: on CUDA they abort the process
_Strides = tuple[tuple[int, ...] | None, ...]
_KNOWN: dict[Any, _Strides | None] = {}  # by operator and arguments; ``None`` if it fails on these


def real_strides(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> _Strides | None:
    """The real strides of each tensor that ``func`` returns (``None`` for other results). ``None`` if the fake strides
    are right."""
    if func in _PRODUCTS or func in _REFUSING or not (_computes(func) or _views(func)):
        return None
    tensors = list(tensors_among((*args, *kwargs.values())))
    if all(_is_plain(tensor) for tensor in tensors) or not all(_can_stand_in(tensor) for tensor in tensors):
        return None
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    key = (func, structure, *(_key(leaf) for leaf in leaves))
    if key not in _KNOWN:
        device = torch.device("meta") if _views(func) else tensors[0].device  # a view touches no memory
        _KNOWN[key] = _tried(func, leaves, structure, device)
    known = _KNOWN[key]
    return None if known is None or len(known) != len(_flat(result)) else known


def with_strides(func: Any, result: Any, strides: _Strides, mode: Any) -> Any:
    """The result of ``func``, with tensors of these strides in place of those with others."""
    made = list(_flat(result))
    for number, (tensor, stride) in enumerate(zip(made, strides, strict=True)):
        if stride is not None and hints(tensor.stride()) != stride:
            stride = _of_view(tensor, stride) if _views(func) else in_symbols(tensor.shape, stride)
            with mode:
                if _views(func):
                    made[number] = torch.as_strided(tensor, tensor.shape, stride, tensor.storage_offset())
                else:
                    made[number] = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    if isinstance(result, list):
        return made
    return tuple(made) if isinstance(result, tuple) else made[0]


def _of_view(tensor: Tensor, strides: tuple[int, ...]) -> tuple[Any, ...]:
    """The ``strides`` of a view in terms of its sizes. A dimension of size 1 gets that of one outside the next
    dimension."""
    found = [*tensor.stride()]
    for dim in reversed(range(len(found) - 1)):
        if hint(found[dim]) != strides[dim]:
            found[dim] = tensor.shape[dim + 1] * found[dim + 1]
    return tuple(found) if hints(found) == strides else in_symbols(tensor.shape, strides)


def tensors_among(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, and those in its lists. Faster than a walk over trees."""
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from (item for item in one if isinstance(item, Tensor))


@functools.cache
def _computes(func: Any) -> bool:
    """Whether the operator returns new memory and does nothing else."""
    return _is_pure(func) and not any(returned.alias_info is not None for returned in func._schema.returns)


@functools.cache
def _views(func: Any) -> bool:
    """Whether the operator returns a view and does nothing else."""
    return _is_pure(func) and len(func._schema.returns) == 1 and func._schema.returns[0].alias_info is not None


def _is_pure(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "aten" and not func._schema.is_mutable


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor has the common layout, also in dimensions of size 1, which decide what counts as channels
    last."""
    return tensor.stride() == contiguous_strides(tensor.shape)


def _can_stand_in(tensor: Tensor) -> bool:
    """Whether zeros may take the place of the tensor: not for bytes, which may be an operator's saved state, nor on a
    device without memory."""
    return tensor.layout is torch.strided and tensor.dtype is not torch.uint8 and tensor.device.type != "meta"


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return hints(leaf.shape), hints(leaf.stride()), leaf.dtype, leaf.device
    leaf = hint(leaf)
    return type(leaf), leaf if isinstance(leaf, (int, float, bool, str, type(None))) else repr(leaf)


def _tried(func: Any, leaves: Sequence[Any], structure: Any, device: torch.device) -> _Strides | None:
    with no_dispatch(), torch.no_grad(), _undisturbed(device):
        real_args, real_kwargs = pytree.tree_unflatten([_stand_in(leaf, device) for leaf in leaves], structure)
        try:
            result = func(*real_args, **real_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
        return tuple(tensor.stride() if isinstance(tensor, Tensor) else None for tensor in _flat(result))


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A context without casts that leaves random generators as they are."""
    if device.type == "meta":
        yield
    else:
        with generators.kept(device), torch.autocast(device.type, enabled=False):
            yield


def _stand_in(leaf: Any, device: torch.device) -> Any:
    """Zeros, which are also valid indices."""
    if not isinstance(leaf, Tensor):
        return hint(leaf)
    device = device if device.type == "meta" else leaf.device
    return torch.empty_strided(hints(leaf.shape), hints(leaf.stride()), dtype=leaf.dtype, device=device).zero_()


def _flat(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)

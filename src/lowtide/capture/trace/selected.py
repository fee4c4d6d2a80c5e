"""Elements that a mask selects and that are written back to the same places: ``x[mask] += 1``, ``x[mask] = y[mask]``.

Their number depends on data, so no program can hold a tensor of them. But the write equals ``torch.where(mask, y, x)``,
on tensors of known shapes, if the operations in between give each element the same bits wherever it is. So a selection
stands for the whole tensor until code does anything else with it. Then it raises the error that the selection itself
would have raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.trace.classes import fake_of
from lowtide.capture.trace.fake import unanswerable
from lowtide.capture.trace.recorder import UnknownError, nodes_of
from lowtide.errors import CaptureError

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_ALONE = {"neg", "abs", "clone"}  # not ``detach``, which shares memory
_WITH_SELECTED = {"add", "sub"}
_WITH_NUMBERS = {"add", "sub", "mul"}


class Selected(torch.Tensor):
    """``whole[mask]``, of which only that is known. ``version``: of ``whole``. ``made``: how the mask was computed.
    Both may be written later. ``why``: the error for any other use."""

    whole: torch.Tensor
    mask: torch.Tensor
    version: int
    made: Any
    why: CaptureError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(one.why for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Selected))


def by_mask(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call that selects elements by a mask, or that computes with such a selection; ``NotImplemented``
    for other calls."""
    if func == _GET and _is_unknown(*args):
        return _selected(args[0], args[1], _made(args[1]))
    found = next((one for one in (*args, *kwargs.values()) if isinstance(one, Selected)), None)
    if found is None:
        return NotImplemented
    if kwargs or found.version != found.whole._version:
        raise found.why
    if func == _SET and args[2] is found and _goes_to(found, *args[:2]):
        mask = args[1].reshape(args[1].shape + (1,) * (args[0].dim() - args[1].dim()))
        args[0].copy_(torch.where(mask, found.whole, args[0]))
        return None
    name = func.__name__.removesuffix("_")
    if not _is_each_alone(name, args, found):
        raise found.why
    whole = getattr(torch, name)(*(one.whole if isinstance(one, Selected) else one for one in args))
    if name == func.__name__:
        return _selected(whole, found.mask, found.made)
    if whole.dtype != found.whole.dtype:
        raise found.why
    found.whole, found.version = whole, whole._version
    return found


def _selected(whole: torch.Tensor, mask: torch.Tensor, made: Any) -> Selected:
    with _disable_current_modes():
        one = torch.empty(0, dtype=whole.dtype, device="meta").as_subclass(Selected)
    with torch._C.DisableTorchFunctionSubclass():
        one.whole, one.mask, one.version, one.made = whole, mask, whole._version, made
        one.why = unanswerable(torch.ops.aten.nonzero.default)
    return one


def _is_unknown(whole: Any, index: Any) -> bool:
    """Whether the index is a mask for these elements whose values are unknown."""
    masks = all(isinstance(one, FunctionalTensor) for one in (whole, index)) and index.dtype is torch.bool
    if not masks or hasattr(fake_of(index), "_lowtide_known"):
        return False
    return 0 < index.dim() <= whole.dim() and bool(whole.shape[: index.dim()] == index.shape)


def _made(mask: torch.Tensor) -> Any:
    """A key that is equal for masks with the same values: the same value of the program, or the result of the same
    operator on the same values, as in ``x[~mask] = y[~mask]``."""
    tracing = torch._C._get_dispatch_mode(_PROXY)
    try:
        ((node,), _) = nodes_of(tracing.tracer, [fake_of(mask)], {})
    except (UnknownError, AttributeError):
        return id(mask), mask._version
    tags = getattr(node.target, "tags", (torch.Tag.nondeterministic_seeded,))
    return node if torch.Tag.nondeterministic_seeded in tags else (node.target, node.args, node.kwargs)


def _goes_to(one: Selected, target: Any, index: Any) -> bool:
    alike = isinstance(index, FunctionalTensor) and index.shape == one.mask.shape and _made(index) == one.made
    return alike and target.shape == one.whole.shape and target.dtype == one.whole.dtype


def _is_each_alone(name: str, args: Sequence[Any], found: Selected) -> bool:
    """Whether the function computes each element from that element and numbers alone, with zero gradients where none
    arrive."""
    kinds = [type(one) for one in args]
    if kinds == [Selected]:
        return name in _ALONE
    if kinds == [Selected, Selected]:
        one, other = args
        alike = (
            one.made == other.made and one.whole.shape == other.whole.shape and other.version == other.whole._version
        )
        return alike and name in _WITH_SELECTED
    number = args[1] if kinds[0] is Selected and len(args) == 2 else None
    return name in _WITH_NUMBERS and isinstance(number, (int, float)) and math.isfinite(number)

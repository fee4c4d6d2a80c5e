"""Replacements for PyTorch functions that read the memory of tensors, for models that run on tensors without memory.

Both traces and rehearsals use them: for tensors made from lists of other tensors, NumPy arrays, packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.trace.classes import TRACED
from lowtide.capture.trace.known_values import read_values
from lowtide.capture.trace.packed import of_packed

READING_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)
READING_TEXTS = (torch.Tensor.__repr__, torch.Tensor.__format__)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_TYPES: dict[type, torch.dtype | None] = {bool: torch.bool, int: torch.int64, float: None}


class Answering(torch.overrides.TorchFunctionMode):
    """A mode in which a model that runs on fake tensors without being traced gets the results that a trace would
    give."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = read_by(func, args, kwargs)
        return answered(func, args, kwargs) if read is None else read


def answered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call."""
    if func in _INDEXING and type(args[1]) is tuple:
        args = (args[0], tuple(_place(one, args[0].device) for one in args[1]), *args[2:])
    made = _made_of(func, args, kwargs)
    return of_packed(func)(*args, **kwargs) if made is None else made


def read_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The array or text that a call makes from a tensor with known values; ``None`` for other calls."""
    if func not in READING_ARRAYS and func not in READING_TEXTS:
        return None
    real = read_values(args[0])
    if real is None:
        return None
    with _disable_current_modes():
        return func(real if real.requires_grad else real.clone(), *args[1:], **kwargs)


def _made_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The result of a call like ``torch.tensor([[a, 1], [b, 2]])`` with traced tensors without dimensions, and numbers.
    Eager reads each as a Python number, so the result has no history, and is on the CPU unless a device is named.
    ``None`` for other calls."""
    of_one = func is torch.Tensor.new_tensor
    if (
        (not of_one and func not in (torch.tensor, torch.as_tensor))
        or kwargs.get("pin_memory")
        or len(args) != 1 + of_one
    ):
        return None
    leaves = _leaves(args[-1])
    if not leaves or not any(isinstance(one, TRACED) for one in leaves):
        return None
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is None:
        device = args[0].device if of_one else torch.get_default_device()
    if dtype is None:
        dtype = args[0].dtype if of_one else functools.reduce(torch.promote_types, map(_type_of, leaves))
    made = _stacked(args[-1], dtype, device)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _place(index: Any, device: torch.device) -> Any:
    """A list in an index as the tensor that PyTorch makes from it, if it contains traced single-element tensors."""
    leaves = _leaves(index)
    if not leaves or not any(isinstance(one, TRACED) for one in leaves):
        return index
    kind = functools.reduce(torch.promote_types, map(_type_of, leaves))
    return _stacked(index, kind if kind in (torch.bool, torch.uint8) else torch.int64, device)


def _leaves(value: Any) -> list[Any] | None:
    """The tensors without dimensions, and the numbers, in nested lists of equal lengths; ``None`` if there is anything
    else."""
    if type(value) not in (list, tuple):
        return None
    if not any(isinstance(one, (list, tuple)) for one in value):
        single = all((isinstance(one, torch.Tensor) and not one.dim()) or type(one) in _TYPES for one in value)
        return [*value] if single else None
    inner = [_leaves(one) for one in value]
    if any(one is None for one in inner) or len({np.shape(_outline(one)) for one in value}) != 1:
        return None
    return [leaf for one in inner for leaf in one or ()]


def _outline(value: Any) -> Any:
    return [_outline(one) for one in value] if isinstance(value, (list, tuple)) else 0


def _type_of(leaf: Any) -> torch.dtype:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    return _TYPES[type(leaf)] or torch.get_default_dtype()


def _stacked(value: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, dtype)
    if isinstance(value, (list, tuple)):
        return torch.stack([_stacked(one, dtype, device) for one in value])
    return torch.full((), value, dtype=dtype, device=device)

"""``torch._foreach_*`` on the CPU: an operator for each tensor, which is what ATen does there.

A program then holds one new tensor at a time, and not all of them (the averages of all weights of a model). Gradients of lists
have formulas of their own, so where gradients are wanted a list stays one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

_SINGLE = {
    "abs", "add", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "mul", "neg", "reciprocal", "sqrt", "sub", "zero",
}  # fmt: skip
_SAME = {"alpha", "non_blocking"}  # keywords that those on tensors have


def for_each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What makes these calls for one that works on a list of tensors; ``None`` for any other call."""
    name = str(getattr(func, "__name__", ""))
    single = name.removeprefix("_foreach_")
    if single == name or single.removesuffix("_") not in _SINGLE or not args or kwargs.keys() - _SAME:
        return None
    lists = [one for one in args if isinstance(one, (list, tuple))]
    tensors = [one for each in (*lists, args) for one in each if isinstance(one, torch.Tensor)]
    if not args[0] or len({*map(len, lists)}) > 1 or any(one.device.type != "cpu" for one in tensors):
        return None
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return None
    in_place = single.endswith("_")
    operator = getattr(torch.Tensor if in_place else torch, single)
    return functools.partial(_called, operator, args, kwargs, list if in_place else tuple)


def _called(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Callable[[Any], Any]) -> Any:
    columns = [one if isinstance(one, (list, tuple)) else repeat(one) for one in args]
    return kind([operator(*each, **kwargs) for each in zip(*columns, strict=False)])

"""``torch._foreach_*`` on the CPU as one operator for each tensor, which is what ATen does there.

So a program holds one new tensor at a time, instead of all (the averages of all weights of a model, say). The gradients
of operators on lists have their own formulas, so where gradients are wanted a list operator stays one.
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
_SAME = {"alpha", "non_blocking"}  # keywords that operators on single tensors have too


def for_each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The function that replaces a call on a list of tensors by calls on each; ``None`` for other calls."""
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

"""Decisions by random numbers that are none: layer drop with probability 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ATEN = torch.ops.aten
_BELOW = {_ATEN.lt.Scalar, _ATEN.le.Scalar}
_ABOVE = {_ATEN.gt.Scalar, _ATEN.ge.Scalar}


def fold_uniform(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """``rand() < p`` for p <= 0 and ``rand() > p`` for p >= 1 are False, and so on: layer drop with probability 0."""
    if func not in _BELOW and func not in _ABOVE:
        return None
    if not getattr(args[0], "_lowtide_uniform", False) or not isinstance(args[1], (int, float)):
        return None
    below = func in _BELOW
    strict = func in (_ATEN.lt.Scalar, _ATEN.gt.Scalar)
    if args[1] < 0 or (args[1] == 0 and func is _ATEN.lt.Scalar):
        return torch.full(args[0].shape, not below)
    if args[1] >= 1:
        return torch.full(args[0].shape, below)
    if args[1] == 0 and not strict and not below:
        return torch.full(args[0].shape, True)
    return None

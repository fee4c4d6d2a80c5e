"""What objects hold, noted to be put back for a while: one among the arguments of a call goes on changing after it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lowtide.objects.keys import is_looked_into
from lowtide.objects.walk import items, own_attributes, reachable, refill

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))


class Held:
    """What these objects hold now, and what is in them, at any depth. Of tensors nothing is kept, nor what holds some."""

    def __init__(self, objects: Iterable[Any]) -> None:
        holders = [found for found in map(_holder, reachable(objects, _may_hold)) if found is not None]
        self._held = [
            (one, _copy(one)) for one in holders if not any(isinstance(each, torch.Tensor) for each in items(one))
        ]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, they hold that again."""
        changed = [(one, then, _copy(one)) for one, then in self._held if not _are_same(one, then)]
        try:
            for one, then, _ in changed:
                refill(one, then)
            yield
        finally:
            for one, _, now in changed:
                refill(one, now)


def _may_hold(value: Any) -> bool:
    return type(value) in _CONTAINERS or type(value) is tuple or is_looked_into(value)


def _holder(value: Any) -> Any:
    """The container that is written where something is written into it; ``None`` where that is unknown."""
    if type(value) in _CONTAINERS:
        return value
    return own_attributes(value) if is_looked_into(value) else None


def _copy(holder: Any) -> Any:
    return dict(holder) if isinstance(holder, dict) else [*holder]


def _are_same(holder: Any, then: Any) -> bool:
    if isinstance(holder, set):
        return holder == {*then}
    now, before = (items(holder), items(then))
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))

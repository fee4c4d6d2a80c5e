"""Holds back or slows Python's collector of reference cycles for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_SELDOM = 20_000  # objects more, after which young ones are looked at
_before: list[tuple[int, int, int]] = []  # thresholds where the collector is not held, while it is


@contextlib.contextmanager
def collector_held() -> Iterator[None]:
    """Inside, cycles are not collected; afterwards they are where they were before. The collector stays enabled: code that runs
    inside may ask whether it is."""
    before = gc.get_threshold()
    held = 0, *before[1:]
    gc.set_threshold(*held)
    _before.append(before)
    try:
        yield
    finally:
        _before.pop()
        if before[0] and gc.get_threshold() == held:  # nobody has set others since
            gc.set_threshold(*before)


def thresholds() -> tuple[int, int, int]:
    """Return the collector's thresholds as they are when it is not held."""
    return _before[0] if _before else gc.get_threshold()


class CollectorSlowed:
    """Until ``end``, cycles are collected less often: where each operator leaves some objects behind that stay for a step, the
    collector would go through all that there are in the process several times a step."""

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._slowed = _SELDOM, *self._before[1:]
        if 0 < self._before[0] < _SELDOM:
            gc.set_threshold(*self._slowed)

    def end(self) -> None:
        if gc.get_threshold() == self._slowed:  # nobody has set others since
            gc.set_threshold(*self._before)


def collect_young() -> None:
    """Free what was made lately and refers to itself in circles, as traces and their errors do: it may hold tensors."""
    gc.collect(1)

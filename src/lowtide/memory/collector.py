"""Pause or slow Python's garbage collector of reference cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_SELDOM = 20_000  # new objects per collection of the young generation
_before: list[tuple[int, int, int]] = []  # thresholds from before each nested hold


@contextlib.contextmanager
def collector_held() -> Iterator[None]:
    """A context without cycle collection; the former thresholds are restored at the end. The collector stays enabled,
    since code inside may ask whether it is."""
    before = gc.get_threshold()
    held = 0, *before[1:]
    gc.set_threshold(*held)
    _before.append(before)
    try:
        yield
    finally:
        _before.pop()
        if before[0] and gc.get_threshold() == held:  # no other code has set thresholds since
            gc.set_threshold(*before)


def thresholds() -> tuple[int, int, int]:
    """Return the collector's thresholds as they are when it is not held."""
    return _before[0] if _before else gc.get_threshold()


class CollectorSlowed:
    """Collect cycles less often until ``end``. If each operator leaves objects that live for a step, the collector
    would traverse all objects of the process several times per step."""

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._slowed = _SELDOM, *self._before[1:]
        if 0 < self._before[0] < _SELDOM:
            gc.set_threshold(*self._slowed)

    def end(self) -> None:
        if gc.get_threshold() == self._slowed:  # no other code has set thresholds since
            gc.set_threshold(*self._before)


def collect_young() -> None:
    """Free young reference cycles, such as those of traces and their errors: they may hold tensors."""
    gc.collect(1)

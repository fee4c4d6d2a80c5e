"""A step cut into slices of equal time: the most that is there in each, and what runs then. What charts draw."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.memory.measurement import Measurement
from lowtide.report.profile import StepProfile


@dataclass(frozen=True, slots=True)
class Slices:
    """``levels[i]``: the most bytes in slice i; ``spans[i]``: the index of the span that has them.

    ``again``: the slices in which something is recomputed, as (first, last) pairs.
    """

    levels: tuple[int, ...]
    spans: tuple[int, ...]
    again: tuple[tuple[int, int], ...]


def slices_of(profile: StepProfile, end_ns: int, count: int) -> Slices:
    """``count`` slices of ``end_ns``; those after the end of the step are left out."""
    levels = [-1] * count
    spans = [0] * count
    again = [False] * count
    used = 0
    for index, (span, level) in enumerate(zip(profile.spans, profile.levels(), strict=True)):
        first, last = _slice(span.start_ns, end_ns, count), _slice(max(span.end_ns - 1, span.start_ns), end_ns, count)
        used = max(used, last + 1)
        for position in range(first, last + 1):
            again[position] |= span.again and span.time_ns > 0
            if level > levels[position]:
                levels[position], spans[position] = level, index
    return Slices(tuple(levels[:used]), tuple(spans[:used]), tuple(_ranges(again[:used])))


def measured_levels(measured: Measurement, count: int) -> tuple[int, ...]:
    """The most bytes in each of ``count`` slices of the measured time; empty where there is no timeline."""
    if not measured.timeline:
        return ()
    levels = [0] * count
    position = level = 0
    for at, now in measured.timeline:
        here = _slice(at, max(measured.time_ns, 1), count)
        for passed in range(position, here + 1):
            levels[passed] = max(levels[passed], level)
        position, level = here, now
        levels[here] = max(levels[here], now)
    for passed in range(position, count):
        levels[passed] = max(levels[passed], level)
    return tuple(levels)


def _slice(at_ns: int, end_ns: int, count: int) -> int:
    return min(at_ns * count // max(end_ns, 1), count - 1)


def _ranges(flags: list[bool]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index, flag in enumerate(flags):
        if flag and found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        elif flag:
            found.append((index, index))
    return found

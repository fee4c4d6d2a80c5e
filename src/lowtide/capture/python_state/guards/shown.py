"""Substitutes for changing numbers that operators are given in a second trace: values that occur nowhere else, so that whatever
derives from them can be recognized. Also predicates that are recorded when operators take such numbers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from lowtide.program.scalars import Source, Taken

_TINY, _LARGE = 1e-6, 1e9  # floats outside this range lose the offset to rounding


def close_to(value: Any, place: int) -> Any:
    """A number close to ``value``, different for each ``place``, so that values derived from it (such as 1 less) differ too.
    Returns ``value`` itself if it is too large."""
    if isinstance(value, int):
        return value + 1_000_003 + 1_009 * place
    if not abs(value) < _LARGE:
        return value
    if abs(value) < _TINY:
        return value + math.copysign(3.17e-7 + 1.13e-9 * place, value)
    return value * (1 - 7.31e-7 - 1.13e-9 * place)


def places_told_apart(
    sources: Sequence[Source], values: Sequence[int], last: int, taken: Sequence[Taken], moved: bool
) -> list[Taken] | None:
    """Positions in a tensor to pass to an operator, the first one between 0 and ``last``. If ``moved``, all are shifted by
    one offset such that no already ``taken`` number maps the same value to the same substitute; ``None`` if there is no such
    offset."""
    begin = values[0]
    known = {one.source: one for one in taken if one.placed}
    pairs = {(one.value, one.shown) for one in taken if not (one.placed and one.source in sources)}
    for by in (*range(1, last - begin + 1), *range(-1, -begin - 1, -1)) if moved else (0,):
        made = [Taken(source, one, one + by, True) for source, one in zip(sources, values, strict=True)]
        apart = not moved or pairs.isdisjoint((one.value, one.shown) for one in made)
        if apart and all(known.get(one.source, one) == one for one in made):
            return made
    return None


def at_least(value: Any, bound: int) -> Any:
    return value >= bound  # nearly always true of positions in a tensor


def at_most(value: Any, bound: int) -> Any:
    return value <= bound


def place_among(value: Any, special: tuple[float, ...]) -> tuple[int, int, bool]:
    """The position of a number among sorted ``special`` ones (left and right insertion points), and whether it is finite."""
    return bisect.bisect_left(special, value), bisect.bisect_right(special, value), math.isfinite(value)

"""What operators are given in the place of numbers that change, while a model is traced once more: others, so that what comes
of them is known by its value. And what is asked of such numbers where operators take them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from lowtide.program.scalars import Source, Taken

_TINY, _LARGE = 1e-6, 1e9  # of floats: beyond these, sums with one are rounded


def close_to(value: Any, place: int) -> Any:
    """A number close to it, another one for each place, so that what operators compute of them, 1 less say, are others, too;
    the same one where it is too large for that."""
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
    """Places in a tensor, the first of which may be from 0 to ``last``: other ones where they are ``moved``, all by as much,
    so that no other number that was ``taken`` has become what one of these has. ``None`` where there are none."""
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
    return value >= bound  # as a place in a tensor nearly always is


def at_most(value: Any, bound: int) -> Any:
    return value <= bound


def place_among(value: Any, special: tuple[float, ...]) -> tuple[int, int, bool]:
    """Where a number lies among others, which are in order, and whether it is finite."""
    return bisect.bisect_left(special, value), bisect.bisect_right(special, value), math.isfinite(value)

"""``--largest NAME``: the largest batch, number of layers or other integer with which a model fits a device.

Each number tried is built and planned by itself, so the answer agrees with ``lowtide fits`` for this number and for the
next one. The search guesses the next number by assuming that memory grows linearly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.report.tables import fact_lines

if TYPE_CHECKING:
    from lowtide import Fit
    from lowtide.whole_step.pipelined import PipelineFit

_LIMIT = 1 << 16
_GUESSES, _MOST_AT_ONCE = 4, 8  # guesses grow, each at most by this factor


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest ``number`` of the argument ``name`` that fits, and the largest ``without`` a plan; 0 if not even 1
    fits. ``fit``: what that number takes; if it is 0, what 1 would take."""

    name: str
    number: int
    without: int
    fit: Fit | PipelineFit

    def __str__(self) -> str:
        tried = " (the most that was tried)" if self.number == _LIMIT else ""
        facts = {f"largest {self.name}": f"{self.number}{tried}", "  without a plan": str(self.without)}
        return "\n".join(fact_lines(facts, indent=""))

    def to_json(self) -> dict[str, Any]:
        names = ("name", "number", "without")
        return {**{name: getattr(self, name) for name in names}, "limited": self.number == _LIMIT}


def largest_that_fits(name: str, fit_of: Callable[[int], Fit | PipelineFit]) -> Largest:
    """Search for it. ``fit_of(number)`` says what a number takes."""
    from lowtide.batches.find import largest

    known = functools.cache(fit_of)
    one = known(1)
    if not one:
        return Largest(name, 0, 0, one)
    guess = 2
    for _ in range(_GUESSES):
        guess = _on_a_line(one.tightest, guess, known(guess).tightest.without_bytes)
    without = largest(lambda number: known(number).fits_without, guess, _LIMIT)
    guess = without or 1
    while known(guess) and guess < _LIMIT:
        guess = min(2 * guess, _LIMIT)
    if not known(guess):
        tightest = known(guess).tightest
        guess = _on_a_line(one.tightest, guess, tightest.resident_bytes + tightest.least_bytes)
    number = largest(lambda number: bool(known(number)), guess, _LIMIT)
    return Largest(name, number, without, known(number))


def _on_a_line(one: Fit, number: int, taken_bytes: int) -> int:
    """A guess for the largest number that fits, if memory grows linearly. ``one`` and ``number`` are known; one unit
    takes ``taken_bytes``. At least 2, and not much larger than ``number``."""
    left = one.capacity_bytes - one.reserve_bytes - one.without_bytes
    fits = 1 + left * (number - 1) // max(taken_bytes - one.without_bytes, 1)
    return min(max(fits, 2), _MOST_AT_ONCE * number, _LIMIT)

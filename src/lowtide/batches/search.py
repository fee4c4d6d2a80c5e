"""The largest number that passes a test."""

from __future__ import annotations

import bisect
from collections.abc import Callable

_FIRST_STEP = 32  # the first step away from a guess is this part of it


def largest(passes: Callable[[int], bool], guess: int, limit: int) -> int:
    """The largest number from 1 to ``limit`` that passes, 0 where 1 does not; every number below one that passes must pass.

    Steps that double lead away from ``guess``, up or down, until the answer lies between two of them; then halving. So a
    guess of 1 is an exponential search, and a good guess takes a few tests.
    """
    guess = min(max(guess, 1), limit)
    step = max(1, guess // _FIRST_STEP)
    if passes(guess):
        low, high = guess, min(guess + step, limit + 1)
        while high <= limit and passes(high):
            low, high, step = high, min(high + 2 * step, limit + 1), 2 * step
    else:
        low, high = max(guess - step, 0), guess
        while low > 0 and not passes(low):
            low, high, step = max(low - 2 * step, 0), low, 2 * step
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda number: not passes(number))

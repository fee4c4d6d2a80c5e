"""The largest number that passes a test."""

from __future__ import annotations

from collections.abc import Callable

_FIRST_STEP = 32  # the first step away from a guess is this part of it


def largest(passes: Callable[[int], bool], guess: int, limit: int) -> int:
    """The largest number from 1 to ``limit`` that passes, 0 where 1 does not; every number below one that passes must pass.

    Steps that double lead away from ``guess``, up or down, until the answer lies between two of them; then halving. So a
    guess of 1 is an exponential search, and a good guess takes a few tests.
    """
    low, high = _bracket(passes, min(max(guess, 1), limit), limit)
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(passes: Callable[[int], bool], guess: int, limit: int) -> tuple[int, int]:
    """One number that passes (or 0) and a larger one that does not (or ``limit + 1``)."""
    step = max(1, guess // _FIRST_STEP)
    if passes(guess):
        low = guess
        while low < limit:
            high = min(low + step, limit)
            if not passes(high):
                return low, high
            low, step = high, 2 * step
        return limit, limit + 1
    high = guess
    while high > 1:
        low = max(high - step, 1)
        if passes(low):
            return low, high
        high, step = low, 2 * step
    return 0, 1

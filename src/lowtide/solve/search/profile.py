"""Bytes over time under range additions, with the largest value and the excess over a budget at hand. Compiled.

Square-root decomposition: slots in blocks of 64, each with its own addition and maximum. An addition costs two partial
blocks and one vector operation over the blocks between.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.solve.model.compact import Numbers
from lowtide.solve.model.compiled import inner

BLOCK = 64
_SHIFT = 6


class Profile(NamedTuple):
    """The value at slot ``i`` is ``inner[i] + added[i // 64]``; ``top`` holds the maximum of each block."""

    inner: Numbers
    added: Numbers
    top: Numbers


def make_profile(slots: int) -> Profile:
    """All zero; ``slots`` is a multiple of 64."""
    return Profile(*(np.zeros(size, np.int64) for size in (slots, slots // BLOCK, slots // BLOCK)))


@inner
def refresh(p: Profile, block: int) -> None:
    """The maximum of a block anew."""
    first = block << _SHIFT
    top = p.inner[first]
    for i in range(first + 1, first + BLOCK):
        top = max(top, p.inner[i])
    p.top[block] = top + p.added[block]


@inner
def add_range(p: Profile, first: int, last: int, amount: int) -> None:
    """Add ``amount`` to the slots from ``first`` to ``last``, both included; nothing where ``first > last``."""
    if first > last or amount == 0:
        return
    left, right = first >> _SHIFT, last >> _SHIFT
    if left == right:
        for i in range(first, last + 1):
            p.inner[i] += amount
        refresh(p, left)
        return
    for i in range(first, (left + 1) << _SHIFT):
        p.inner[i] += amount
    refresh(p, left)
    for block in range(left + 1, right):
        p.added[block] += amount
        p.top[block] += amount
    for i in range(right << _SHIFT, last + 1):
        p.inner[i] += amount
    refresh(p, right)


@inner
def settle(p: Profile) -> None:
    """All maxima anew, after ``inner`` was written directly."""
    p.added[:] = 0
    for block in range(len(p.top)):
        refresh(p, block)


@inner
def peak_of(p: Profile) -> int:
    peak = 0
    for block in range(len(p.top)):
        peak = max(peak, p.top[block])
    return peak


@inner
def excess_of(p: Profile, budget: int) -> tuple[int, int]:
    """The largest excess over the budget, and the sum over the blocks of the largest in each."""
    largest, total = 0, 0
    for block in range(len(p.top)):
        over = max(p.top[block] - budget, 0)
        total += over
        largest = max(largest, over)
    return largest, total

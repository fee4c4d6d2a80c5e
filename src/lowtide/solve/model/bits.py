"""Sets of small numbers as the bits of an integer, for the searches over memory states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import SupportsInt


def bits(numbers: Iterable[SupportsInt]) -> int:
    total = 0
    for number in numbers:
        total |= 1 << int(number)
    return total


def members(total: int) -> Iterator[int]:
    """Ascending."""
    while total:
        low = total & -total
        yield low.bit_length() - 1
        total ^= low

"""States of memory as bit sets, for the searches over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import SupportsInt

from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.ragged import rows

MemoryState = tuple[int, int, int, int]
"""The next first compute; live storages, formed views and saved generator states as bit sets."""


def bits(numbers: Iterable[SupportsInt]) -> int:
    """The set of small numbers as the bits of an integer."""
    total = 0
    for number in numbers:
        total |= 1 << int(number)
    return total


def members(total: int) -> Iterator[int]:
    """The numbers of a bit set, ascending."""
    while total:
        low = total & -total
        yield low.bit_length() - 1
        total ^= low


class MemorySpace:
    """A compact graph's tables as bit sets."""

    def __init__(self, model: CompactGraph) -> None:
        self.model = model
        self.reads = [bits(row) for row in rows(model.reads_start, model.reads)]
        self.owns = [bits(row) for row in rows(model.owns_start, model.owns)]
        self.needs = [bits(row) for row in rows(model.needs_start, model.needs)]
        self.views = [bits(row) for row in rows(model.views_start, model.views)]
        self.held = bits(storage for storage, held in enumerate(model.held) if held)

"""Buffers to be placed: bytes with a lifetime, and the least that they take up together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.errors import PlanError

Numbers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]
MOST = 1 << 62  # of any number, and of the bytes of all buffers together


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """``size[i]`` bytes that are live from ``lower[i]`` to before ``upper[i]``, at least one unit of time.

    Offsets are multiples of ``alignment``, and a buffer takes up its size rounded up to one. Raises ``PlanError`` for a
    buffer that ``check_buffer`` refuses, columns of unequal length, and an alignment below 1.
    """

    lower: Numbers
    upper: Numbers
    size: Numbers
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise PlanError(f"the alignment is {self.alignment} bytes, but must be at least 1.")
        if not len(self.lower) == len(self.upper) == len(self.size):
            raise PlanError("buffers need as many lifetimes as sizes.")
        wrong = np.flatnonzero((self.upper <= self.lower) | (self.size < 0))
        for i in wrong[:1].tolist():
            check_buffer(f"buffer {i}", int(self.lower[i]), int(self.upper[i]), int(self.size[i]))
        if sum(self.size.tolist()) + self.alignment * len(self.size) >= MOST:
            raise PlanError("the buffers have more bytes together than any device has.")

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]], alignment: int = 1) -> Buffers:
        """From rows of lower, upper and size."""
        lower, upper, size = np.array(list(rows), np.int64).reshape(-1, 3).T.copy()
        return cls(lower, upper, size, alignment)

    def __len__(self) -> int:
        return len(self.size)

    @property
    def padded(self) -> Numbers:
        """What each takes up, in bytes."""
        return -(-self.size // self.alignment) * self.alignment

    @property
    def load_bytes(self) -> int:
        """The most that is live at one time: no placement takes up less."""
        found = sections(self)
        return int(found.load_bytes.max(initial=0))

    def reserved_bytes(self, offsets: Numbers) -> int:
        """What a placement takes up: where the highest buffer ends."""
        return int((offsets + self.padded).max(initial=0))


def check_buffer(name: str, lower: int, upper: int, size: int) -> None:
    """Raises ``PlanError`` for an empty or negative lifetime, a negative size, and numbers out of range."""
    if upper <= lower:
        raise PlanError(f"{name} lives from {lower} to before {upper}; upper must be above lower.")
    if size < 0:
        raise PlanError(f"{name} has a size of {size} bytes, but must have at least 0.")
    if max(abs(lower), abs(upper), size) >= MOST:
        raise PlanError(f"{name} has numbers that do not fit 64 bits: {lower}, {upper}, {size}.")


class Sections(NamedTuple):
    """Time cut into sections, numbered in order. Buffer i is live from section ``first[i]`` to before ``last[i]``;
    ``load_bytes``: live bytes by section."""

    first: Indices
    last: Indices
    load_bytes: Numbers


def sections(buffers: Buffers) -> Sections:
    """The sections in which no live set is a part of a neighbour's: those that begin with some buffer and end with one. All
    constraints of a placement lie in them."""
    times, places = np.unique(np.concatenate([buffers.lower, buffers.upper]), return_inverse=True)
    begins, ends = places[: len(buffers)], places[len(buffers) :]
    starts, stops = np.zeros(len(times) + 1, bool), np.zeros(len(times) + 1, bool)
    starts[begins], stops[ends] = True, True
    kept = np.concatenate([[0], np.cumsum(starts[:-1] & stops[1:])])  # sections kept before each time
    first, last = kept[begins], kept[ends]
    change = np.zeros(int(kept[-1]) + 1, np.int64)
    np.add.at(change, first, buffers.padded)
    np.subtract.at(change, last, buffers.padded)
    return Sections(first.astype(np.int32), last.astype(np.int32), np.cumsum(change)[:-1])

"""Buffers to be placed: sizes with lifetimes, and the load, a lower bound on the memory that any placement takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.errors import PlanError

Numbers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]
MOST = 1 << 62  # the limit of every number, and of the sum of all sizes


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Buffers to be placed: buffer i has ``size[i]`` bytes and is live from ``lower[i]`` until just before ``upper[i]``.

    Offsets are multiples of ``alignment``, and sizes are rounded up to a multiple. Raises ``PlanError`` for a buffer that
    ``check_buffer`` refuses, columns of unequal length, too many bytes in total, and an alignment below 1.
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
        """Make buffers from rows of (lower, upper, size)."""
        lower, upper, size = np.array(list(rows), np.int64).reshape(-1, 3).T.copy()
        return cls(lower, upper, size, alignment)

    def __len__(self) -> int:
        return len(self.size)

    @property
    def padded(self) -> Numbers:
        """Size of each buffer in bytes, rounded up to the alignment."""
        return -(-self.size // self.alignment) * self.alignment

    @property
    def load_bytes(self) -> int:
        """The most bytes that are live at one time; no placement takes less."""
        found = sections(self)
        return int(found.load_bytes.max(initial=0))

    def reserved_bytes(self, offsets: Numbers) -> int:
        """Return the bytes that a placement takes: the end of its highest buffer."""
        return int((offsets + self.padded).max(initial=0))


def check_buffer(name: str, lower: int, upper: int, size: int) -> None:
    """Raise ``PlanError`` for an empty or negative lifetime, a negative size, and numbers out of range."""
    if upper <= lower:
        raise PlanError(f"{name} lives from {lower} to before {upper}; upper must be above lower.")
    if size < 0:
        raise PlanError(f"{name} has a size of {size} bytes, but must have at least 0.")
    if max(abs(lower), abs(upper), size) >= MOST:
        raise PlanError(f"{name} has numbers that do not fit 64 bits: {lower}, {upper}, {size}.")


class Sections(NamedTuple):
    """Time cut into sections, numbered in order. Buffer i is live from section ``first[i]`` until just before section
    ``last[i]``; ``load_bytes``: live bytes per section."""

    first: Indices
    last: Indices
    load_bytes: Numbers


def sections(buffers: Buffers) -> Sections:
    """Cut time into the sections whose live set is not a subset of a neighbouring section's: each starts when some buffer
    starts and ends when some buffer ends. All constraints of a placement are in these."""
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

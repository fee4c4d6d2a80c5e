"""Greedy placement: place buffers one after the other. Gives quick placements, and the orders that the search starts from.

The orders are those of offline allocators: by size, by lifetime, by their product, and by contention (the load of the most
loaded section in which a buffer is live). ``Rule.LOWEST`` keeps a skyline and places the buffer that lies lowest on it next;
on training graphs its first placement usually takes no more than the load, which is optimal.

Time of a pass: (pairs of buffers that are live together) x log (neighbours of a buffer).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lowtide.native import core
from lowtide.place.buffers import Buffers, Indices, Numbers, Sections

Keys = Mapping[str, npt.NDArray[np.int64 | np.float64]]


class Rule(enum.IntEnum):
    """The rule that chooses the place of the next buffer, or (``LOWEST``) the next buffer itself."""

    FIRST = 0  # into the lowest gap that holds it
    BEST = 1  # into the smallest gap that holds it
    LOWEST = 2  # next is the buffer that would lie lowest on top of the placed ones, of equal ones the first


ORDERS = (
    ("contention", "lifetime", "size"),
    ("contention", "area", "lifetime"),
    ("lifetime", "area", "contention"),
    ("area", "contention", "size"),
    ("size", "contention", "lifetime"),
    ("contention", "sections", "size"),
    ("area", "size"),
    ("contention", "size", "lifetime"),
    ("begin", "size"),
)
"""Keys of each order, the largest first; ``begin`` is the time at which a buffer comes, the latest first."""


def order_keys(buffers: Buffers, found: Sections) -> Keys:
    """Compute the keys of ``ORDERS`` for every buffer; ``sections`` is a lifetime counted in sections."""
    lifetime = buffers.upper - buffers.lower
    most = [found.load_bytes[a:b].max() for a, b in zip(found.first.tolist(), found.last.tolist(), strict=True)]
    return {
        "contention": np.array(most, np.int64),
        "lifetime": lifetime,
        "sections": (found.last - found.first).astype(np.int64),
        "size": buffers.padded,
        "area": lifetime.astype(np.float64) * buffers.padded,
        "begin": found.first.astype(np.int64),
    }


def sorted_by(keys: Keys, names: Sequence[str]) -> Indices:
    """Return the buffers with the largest keys first, equal ones by number."""
    columns = [-keys[name] for name in reversed(names)]
    return np.lexsort(columns).astype(np.int32)


def simple_placements(native: core.Buffers, keys: Keys) -> Iterator[Numbers]:
    """Yield offsets for each order and rule; those that are most often the best come first."""
    for rule, count in ((Rule.LOWEST, len(ORDERS)), (Rule.BEST, 3), (Rule.FIRST, 3)):
        for names in ORDERS[:count]:
            yield native.fit(sorted_by(keys, names), rule)

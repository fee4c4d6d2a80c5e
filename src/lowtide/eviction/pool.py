"""The storages of a running program: which are there, which were evicted, and which to evict next.

The clock is logical: it advances by the cost of every operator, so that staleness does not depend on the machine. Linear
in the storages that could be evicted per choice; ``sample`` looks at a random sample of root-many of them and leaves
out those below 1 % of the mean size, as the paper's prototype does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lowtide.eviction.scores import Facts, neighbourhood_for, score_of

_SMALL = 0.01


class Pool:
    """Per storage: ``bytes``, ``cost_ns`` of the operator that computes it, ``parents`` and ``children``.

    A storage is *resident*, *evicted* (to be rebuilt when read) or neither: not computed yet.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        cost_ns: Sequence[int],
        parents: Sequence[Sequence[int]],
        *,
        heuristic: str = "dtr-eq",
        sample: bool = False,
        seed: int = 0,
    ) -> None:
        self.sizes = list(sizes)
        self.cost_ns = list(cost_ns)
        self.parents = [tuple(row) for row in parents]
        self.children = _inverse(self.parents)
        self.evicted = [False] * len(self.sizes)
        self.resident: dict[int, None] = {}  # in the order of arrival
        self.locks = [0] * len(self.sizes)
        self.pinned = [False] * len(self.sizes)
        self.accessed_ns = [0] * len(self.sizes)
        self.clock_ns = 0
        self.bytes = 0
        self.sample = sample
        self.draw = random.Random(seed)
        self._score = score_of(heuristic)
        self._around = neighbourhood_for(heuristic, self)

    def tick(self, cost_ns: int) -> None:
        """An operator has run."""
        self.clock_ns += cost_ns

    def touch(self, storage: int) -> None:
        """The storage was read or written."""
        self.accessed_ns[storage] = self.clock_ns

    def add(self, storage: int) -> None:
        """The storage was computed, for the first time or again."""
        if self.evicted[storage]:
            self._around.restore(storage)
            self.evicted[storage] = False
        self.resident[storage] = None
        self.bytes += self.sizes[storage]
        self.touch(storage)

    def evict(self, storage: int) -> None:
        """The storage is gone, until someone reads it."""
        del self.resident[storage]
        self.bytes -= self.sizes[storage]
        self.evicted[storage] = True
        self._around.evict(storage)

    def victim(self) -> int | None:
        """The storage with the least score, the earliest to arrive among equals; ``None`` where none can go."""
        candidates = [s for s in self.resident if not self.pinned[s] and self.locks[s] == 0 and self.sizes[s] > 0]
        if self.sample and candidates:
            candidates = self._sampled(candidates)
        return min(candidates, key=self._scored, default=None)

    def _scored(self, storage: int) -> float:
        stale_ns = self.clock_ns - self.accessed_ns[storage]
        around_ns = self._around.cost_ns(storage)
        return self._score(Facts(self.sizes[storage], self.cost_ns[storage], around_ns, stale_ns), self.draw)

    def _sampled(self, candidates: list[int]) -> list[int]:
        mean = sum(self.sizes[s] for s in candidates) / len(candidates)
        large = [s for s in candidates if self.sizes[s] >= _SMALL * mean]
        return self.draw.sample(large, min(len(large), math.isqrt(len(large) - 1) + 1))


def _inverse(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    inverse: list[list[int]] = [[] for _ in rows]
    for index, row in enumerate(rows):
        for entry in row:
            inverse[entry].append(index)
    return inverse

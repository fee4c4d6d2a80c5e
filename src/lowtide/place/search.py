"""The search for a placement within a capacity: branch and bound, started again and again from other orders.

Exact where it ends: it finds a placement or proves that there is none. The problem is NP-complete, so that it may not end; each
attempt is given up after a number of visits.

The ideas are those of MiniMalloc (Moffitt, ASPLOS 2023) in another arrangement. A placement may be taken to be *canonical*,
every buffer resting on the ground or on another one, and is built from below: the buffer that can lie lowest now, the first
in the order among equals, either lies there, or it is *refused*, and must then rest on a buffer that is not placed yet. So

- no buffer is placed below one that is placed, and none so high that another one fits under it: nothing is looked at twice
  for the order in which it came about, nor where a lower placement does as well;
- every buffer has a least offset: the top of what lies below it, or, where it is refused, the least top of those that it may
  rest on. A branch ends where in some section the buffers from a least offset on have more bytes than there are above it
  (the bound of one machine with release dates; with the lowest offset alone it is MiniMalloc's inference by sections);
- what is left falls into parts wherever no buffer crosses a section's end, and each is solved by itself; a part of which it
  is known that it cannot be placed on what it lies on is not tried again;
- of buffers that are alike only one is tried, and one that has no neighbours left is placed where it can lie lowest.

The first attempts take the orders of ``lowtide.place.orders``; later ones sort by products of random powers of contention,
lifetime, size and *blame*, with some noise. Blamed are the buffers that had too many bytes where a branch ended, as in the
weighted degrees of constraint solvers (Boussemart and others, 2004): what was hard to place comes first in the next attempt.
Few attempts find a placement, but those that do find it soon, so that many short ones are better than a long one: their
lengths follow Luby's sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.native import core
from lowtide.place.buffers import Indices, Numbers
from lowtide.place.orders import ORDERS, Keys, sorted_by
from lowtide.solve.problem import Status
from lowtide.solve.threads import in_threads

_STATUS = (Status.FEASIBLE, Status.INFEASIBLE, Status.UNSOLVED)
_FADING, _FRESH = 0.9, 40  # what is left of blame from one attempt to the next; attempts after which it is forgotten
_SECOND = 1e9  # as good as without a limit, and not too long for a clock


class Outcome(NamedTuple):
    """What an attempt within a capacity came to: ``FEASIBLE`` with offsets, ``INFEASIBLE`` where there is no placement, or
    ``UNSOLVED``. ``visits``: of a buffer in a section, the measure of its work."""

    status: Status
    offsets: Numbers
    visits: int


class Search:
    """Attempts, one after the other, that learn from those that failed."""

    def __init__(self, native: core.Buffers, keys: Keys, seed: int) -> None:
        self.native = native
        self.keys = keys
        self.random = np.random.default_rng(seed)
        names = ("contention", "lifetime", "sections", "size")
        self.logs = {name: np.log(keys[name].astype(np.float64)) for name in names}
        self.blame = np.zeros(len(keys["size"]))
        # Of a short attempt: enough to place all buffers a few times without going back.
        self.visits = min(2 * int(keys["sections"].sum()) * len(keys["sections"]), 2 * 10**7)
        self.made = 0

    def within(self, capacities: Sequence[int], most_visits: float, seconds: float) -> list[Outcome]:
        """An attempt for each capacity, with so many visits together and at most so long."""
        share = max(1, int(min(most_visits, 1e15)) // len(capacities))
        asked = []
        for capacity in capacities:
            rank = self._next_rank()
            self.made += 1
            asked.append((rank, capacity, min(self.visits * luby(self.made), share), min(seconds, _SECOND)))
        found = in_threads(lambda one: self.native.pack(*one), asked)
        for _, _, blame, _ in found:
            self.blame = _FADING * self.blame + blame / max(int(blame.sum()), 1)
        return [Outcome(_STATUS[status], offsets, visits) for status, offsets, _, visits in found]

    def _next_rank(self) -> Indices:
        """By buffer, who comes first among those that lie equally low."""
        if self.made % _FRESH == 0:
            self.blame[:] = 0
        order = sorted_by(self.keys, ORDERS[self.made]) if self.made < len(ORDERS) else _heaviest_first(self._weights())
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return rank

    def _weights(self) -> npt.NDArray[np.float64]:
        random, logs = self.random, self.logs
        angle = np.radians(random.uniform(-20.0, 55.0))
        length = logs[("lifetime", "sections")[random.integers(2)]]
        contention = (0.0, 1.0, 3.0, 1000.0)[random.integers(4)] * logs["contention"]
        noise = (0.0, 0.1, 0.3, 0.6)[random.integers(4)] * random.random(len(length))
        weights: npt.NDArray[np.float64] = contention + np.cos(angle) * length + np.sin(angle) * logs["size"] + noise
        if self.blame.any() and random.random() < 0.75:
            weights = weights + 2.0 * random.random() * np.log(1e-3 + self.blame / self.blame.max())
        return weights


def _heaviest_first(weights: npt.NDArray[np.float64]) -> Indices:
    return np.argsort(-weights, kind="stable").astype(np.int32)


def luby(i: int) -> int:
    """The i-th number of 1, 1, 2, 1, 1, 2, 4, ..., the limits on restarts that are good whatever the times of the attempts
    (Luby, Sinclair and Zuckerman, 1993)."""
    while (i + 1) & i:
        i -= (1 << (i.bit_length() - 1)) - 1
    return (i + 1) >> 1

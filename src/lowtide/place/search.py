"""Search for a placement within a capacity: branch and bound with restarts, each from another order of the buffers.

Exact if it ends: it finds a placement or proves that there is none. The problem is NP-complete, so it may not end; each
attempt is given up after a number of visits.

The ideas are those of MiniMalloc (Moffitt, ASPLOS 2023), arranged differently. Without loss of generality a placement is
*canonical*: every buffer rests on the ground or on another buffer. It is built from below: the buffer that can lie lowest, of
equal ones the first in the order, is either placed there or *refused*; then it must rest on a buffer that is not placed yet.

- No buffer is placed below a placed one, nor so high that another fits under it. So no placement is visited twice in different
  orders, nor one for which a lower placement does as well.
- Every buffer has a least offset: the top of the buffers below it, or, if refused, the least top of those that it may rest on.
  A branch ends when in some section the buffers with at least some least offset have more bytes than there are above that
  offset (the bound of one machine with release dates; with the lowest offset alone it is MiniMalloc's section inference).
- The remaining buffers split into independent parts at section ends that no buffer crosses; each part is solved by itself. A
  part that is known not to fit on top of what lies below it is not tried again.
- Of identical buffers only one is tried; a buffer without unplaced neighbours is placed where it can lie lowest.

The first attempts take the orders of ``lowtide.place.orders``; later ones sort by products of random powers of contention,
lifetime, size and *blame*, with some noise. The buffers that had too many bytes when a branch ended are blamed, like the
weighted degrees of constraint solvers (Boussemart and others, 2004), so that hard buffers are placed first in the next
attempt. Few attempts succeed, but those that do succeed early, so many short attempts are better than a long one: their
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
_FADING, _FRESH = 0.9, 40  # factor on blame after each attempt; attempts after which it is reset
_SECOND = 1e9  # stands for no limit, without overflowing a clock


class Outcome(NamedTuple):
    """The result of an attempt within a capacity: ``FEASIBLE`` with offsets, ``INFEASIBLE`` (proven) or ``UNSOLVED``.
    ``visits``: the work done, counted in visits of a buffer in a section."""

    status: Status
    offsets: Numbers
    visits: int


class Search:
    """A sequence of attempts that learn from failed ones through blame."""

    def __init__(self, native: core.Buffers, keys: Keys, seed: int) -> None:
        self.native = native
        self.keys = keys
        self.random = np.random.default_rng(seed)
        names = ("contention", "lifetime", "sections", "size")
        self.logs = {name: np.log(keys[name].astype(np.float64)) for name in names}
        self.blame = np.zeros(len(keys["size"]))
        # Visits of a short attempt: enough to place all buffers a few times without backtracking.
        self.visits = min(2 * int(keys["sections"].sum()) * len(keys["sections"]), 2 * 10**7)
        self.made = 0

    def within(self, capacities: Sequence[int], most_visits: float, seconds: float) -> list[Outcome]:
        """Run one attempt per capacity in parallel, within ``most_visits`` in total and ``seconds`` each."""
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
        """Return each buffer's rank in the order that decides between buffers that can lie equally low."""
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
    """Return the i-th number of Luby's sequence 1, 1, 2, 1, 1, 2, 4, ...: restart limits that are near optimal whatever the
    distribution of the attempts' times (Luby, Sinclair and Zuckerman, 1993)."""
    while (i + 1) & i:
        i -= (1 << (i.bit_length() - 1)) - 1
    return (i + 1) >> 1

"""Shortest path over memory states, for graphs of a few nodes: what the searches are measured against, and what
``auto`` uses where it is affordable.

A state is (nodes computed for the first time, live storages, live views, saved generator states); an edge computes a
node whose inputs are live (time, and a peak that has to fit), perhaps over one of them, forms a view, frees a storage or
forgets a saved state.
Dijkstra's algorithm gives the least time within a budget, or the least peak. Exact for order-preserving schedules with
recomputation anywhere, on the compact model. The number of states is exponential in the number of storages: for at
most about ten nodes; ``None`` where the limit is passed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsInt

from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.ragged import rows

MAX_NODES = 9
MAX_STORAGES = 12
MAX_STATES = 30_000

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


@dataclass(frozen=True, slots=True)
class Optimum:
    """``nodes`` is empty where no sequence fits (``feasible`` false)."""

    feasible: bool
    nodes: tuple[int, ...]
    time_ns: int
    peak_bytes: int


def affordable(model: CompactGraph) -> bool:
    return model.nodes <= MAX_NODES and len(model.storage_node) <= MAX_STORAGES


def shortest(model: CompactGraph, budget_bytes: int | None) -> Optimum | None:
    """The least time within the budget; with ``None`` the least peak. ``None`` where there are too many states."""
    space = _Space(model)
    by_peak = budget_bytes is None
    start: MemoryState = (0, 0, 0, 0)
    ticket = itertools.count()
    queue: list[tuple[tuple[int, int], int, MemoryState]] = [((0, 0), next(ticket), start)]
    best: dict[MemoryState, tuple[int, int]] = {start: (0, 0)}
    came: dict[MemoryState, tuple[MemoryState, int]] = {}
    settled: set[MemoryState] = set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        if len(settled) > MAX_STATES:
            return None
        if state[0] > model.nodes:
            peak, time = cost if by_peak else cost[::-1]
            return Optimum(True, _path(state, came, model.nodes), time + model.constant_ns, peak)
        for after, node, time, step in space.edges(state):
            if budget_bytes is not None and step > budget_bytes:
                continue
            peak = max(cost[0 if by_peak else 1], step)
            total = cost[1 if by_peak else 0] + time
            key = (peak, total) if by_peak else (total, peak)
            if after not in best or key < best[after]:
                best[after] = key
                came[after] = (state, node)
                heapq.heappush(queue, (key, next(ticket), after))
    return Optimum(False, (), 0, 0)


def _path(state: MemoryState, came: dict[MemoryState, tuple[MemoryState, int]], end: int) -> tuple[int, ...]:
    nodes: list[int] = []
    while state in came:
        state, node = came[state]
        if 0 <= node < end:
            nodes.append(node)
    return tuple(reversed(nodes))


class _Space(MemorySpace):
    """The edges out of a state."""

    def __init__(self, model: CompactGraph) -> None:
        super().__init__(model)
        self.overs = rows(model.overs_start, model.overs)

    def edges(self, state: MemoryState) -> Iterator[tuple[MemoryState, int, int, int]]:
        """(state after, node computed or -1, time, bytes resident during the step)."""
        first, live, views, saved = state
        for storage in members(live & ~self.held):
            yield (first, live & ~(1 << storage), views & ~self.views[storage], saved), -1, 0, 0
        for node in members(saved):
            yield (first, live, views, saved & ~(1 << node)), -1, 0, 0
        yield from self._compute(state, first, (False, True) if self.model.random[first] else (False,))
        for node in range(first):
            random = bool(self.model.random[node])
            allowed = self.model.recomputable[node] and (not random or saved >> node & 1)
            if allowed and self.owns[node] & ~live:
                yield from self._compute(state, node, (False,))

    def _compute(
        self, state: MemoryState, node: int, saves: tuple[bool, ...]
    ) -> Iterator[tuple[MemoryState, int, int, int]]:
        first, live, views, saved = state
        model = self.model
        if self.reads[node] & ~live:
            return
        formed = views | self.needs[node]
        time = int(model.time_ns[node]) + sum(int(model.view_time_ns[v]) for v in members(formed & ~views))
        for save in saves:
            kept = saved | (1 << node if save else 0)
            step = model.fixed_bytes + int(model.workspace_bytes[node]) + kept.bit_count() * model.rng_state_bytes
            step += sum(int(model.storage_bytes[s]) for s in members(live))
            step += sum(int(model.storage_bytes[s]) for s in members(self.owns[node]))
            later = first + (node == first)
            yield (later, live | self.owns[node], formed, kept), node, time, step
            for storage in self.overs[node] if not live & self.owns[node] else ():
                after = live & ~(1 << storage) | self.owns[node], formed & ~self.views[storage]
                yield (later, *after, kept), node, time, step - int(model.storage_bytes[storage])

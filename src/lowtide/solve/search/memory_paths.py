"""Shortest path over memory states that are full: the exact search that settles what ``checkmate``'s programs leave open, and
graphs of a few nodes altogether, for ``auto`` and for what searches are measured against.

A state is (next first compute, live storages, formed views, kept generator states). Edges compute one node. Nothing is
freed before room is needed: an edge frees a smallest set of storages and states that makes its node fit (no part of it
would do), and one edge leads out for every such set; another one where the node may write over what it reads, which is gone
then. What no later compute can read is dropped at once. Complete,
because a free may always be put off until the compute that needs its room. A state that has no more than another of the
same frontier which was reached in no more time is dropped. Dijkstra's algorithm on the recompute time, so that only
states cheaper than the best schedule known are looked at.

Exact for order-preserving schedules with recomputation anywhere, on the compact model. Exponential in the worst case:
``None`` where more than ``states`` are met. The least peak is the smallest budget that has a path, found by halving.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsInt

import numpy as np

from lowtide.solve.model.compact import CompactGraph, encode_keep_all
from lowtide.solve.model.ragged import rows
from lowtide.solve.model.reach import reach
from lowtide.solve.model.sweep import sweep

MAX_NODES, MAX_STORAGES = 9, 12  # of graphs that are solved exactly
MAX_STATES = 30_000  # for that

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


@dataclass(frozen=True, slots=True)
class Path:
    """``nodes`` in the order in which they are computed; empty where there is no path (``found`` false). ``time_ns``: of the
    whole schedule."""

    found: bool
    nodes: tuple[int, ...] = ()
    time_ns: int = 0


def affordable(model: CompactGraph) -> bool:
    """Whether ``shortest`` and ``least_peak`` mostly come to an end."""
    return model.nodes <= MAX_NODES and len(model.storage_node) <= MAX_STORAGES


def shortest(model: CompactGraph, budget_bytes: int) -> Path | None:
    """The quickest path within the budget; ``None`` where there are too many states."""
    return cheapest_path(model, budget_bytes, states=MAX_STATES)


def least_peak(model: CompactGraph) -> int | None:
    """The smallest budget that has a path; ``None`` where there are too many states."""
    low, high = model.fixed_bytes, model.fixed_bytes + sweep(model, encode_keep_all(model)).peak_bytes
    while low < high:
        middle = (low + high) // 2
        path = cheapest_path(model, middle, states=MAX_STATES, any_path=True)
        if path is None:
            return None
        low, high = (low, middle) if path.found else (middle + 1, high)
    return low


def cheapest_path(
    model: CompactGraph, budget_bytes: int, below_ns: float = float("inf"), states: int = 4_000, any_path: bool = False
) -> Path | None:
    """The quickest path within the budget if it takes less than ``below_ns``.

    ``any_path``: some path, looked for depth first. ``None``: given up, after ``states`` states or as much other work.
    """
    space = _Space(model, budget_bytes)
    start: MemoryState = (0, 0, 0, 0)
    ticket = itertools.count()
    queue: list[tuple[int, int, int, MemoryState, int]] = [(0, 0, next(ticket), start, -1)]
    trail: list[tuple[int, int]] = []  # settled step -> (step before, node)
    settled: list[list[MemoryState]] = [[] for _ in range(model.nodes + 2)]
    work = 0
    while queue:
        _, cost, _, state, parent = heapq.heappop(queue)
        step, node = parent >> 20, parent & 0xFFFFF
        if state[0] > model.nodes:
            return Path(True, _nodes(trail, step), model.least_ns + cost)
        if _dominated(state, settled[state[0]]):
            continue
        settled[state[0]].append(state)
        trail.append((step, node) if parent >= 0 else (-1, -1))
        for after, computed, time in space.edges(state):
            work += 1
            if len(trail) > states or work > 15 * states:
                return None
            total = cost + time
            if model.least_ns + total < below_ns and not _dominated(after, settled[after[0]]):
                order = -after[0] if any_path else total
                heapq.heappush(queue, (order, total, next(ticket), after, (len(trail) - 1) << 20 | computed))
    return Path(False)


def _dominated(state: MemoryState, known: Iterable[MemoryState]) -> bool:
    """Whether a known state of the same frontier has everything that this one has."""
    _, live, views, kept = state
    return any(not (live & ~other[1] or views & ~other[2] or kept & ~other[3]) for other in known)


def _nodes(trail: list[tuple[int, int]], step: int) -> tuple[int, ...]:
    nodes: list[int] = []
    while step > 0:
        step, node = trail[step]
        nodes.append(node)
    return tuple(reversed(nodes))


class _Space:
    """The edges out of a state, from a compact graph's tables as bit sets."""

    def __init__(self, model: CompactGraph, budget_bytes: int) -> None:
        self.model = model
        self.room = budget_bytes - model.fixed_bytes
        tables = reach(model)
        self.reads, self.owns, self.needs = (list(map(bits, t)) for t in (tables.reads, tables.owns, tables.needs))
        self.views = [bits(row) for row in rows(model.views_start, model.views)]
        self.overs = rows(model.overs_start, model.overs)
        self.held = bits(np.flatnonzero(model.held))
        self.handed = bits(np.flatnonzero(model.handed))
        self.until = tables.node_until
        self.sizes = model.storage_bytes.tolist()
        self.view_times = model.view_time_ns.tolist()
        stages = range(model.nodes + 2)
        self.useful = [bits(s for s, until in enumerate(tables.storage_until) if until >= t) for t in stages]
        self.random = [bits(i for i in range(model.nodes) if model.random[i] and self.until[i] >= t) for t in stages]
        self.own_bytes = [sum(self.sizes[s] for s in row) for row in tables.owns]

    def edges(self, state: MemoryState) -> Iterator[tuple[MemoryState, int, int]]:
        """(state after, node computed, time beyond first computes)."""
        first, live, _, kept = state
        resident = sum(self.sizes[s] for s in members(live))
        for node in range(first + 1):
            if self.reads[node] & ~live:
                continue
            if node < first:
                wanted = self.model.recomputable[node] and self.until[node] >= first and self.owns[node] & ~live
                if wanted and (not self.model.random[node] or kept >> node & 1):
                    yield from self._compute(state, node, resident, kept)
            else:
                yield from self._compute(state, node, resident, kept)
                if self.random[first] >> node & 1:
                    yield from self._compute(state, node, resident, kept | 1 << node)

    def _compute(
        self, state: MemoryState, node: int, resident: int, kept: int
    ) -> Iterator[tuple[MemoryState, int, int]]:
        first, live, views, _ = state
        state_bytes = self.model.rng_state_bytes
        over = resident + self.own_bytes[node] + int(self.model.workspace_bytes[node]) - self.room
        over += kept.bit_count() * state_bytes
        following = first + (node == first)
        time = 0 if node == first else int(self.model.time_ns[node])
        formed = self.needs[node] & ~views
        time += sum(self.view_times[v] for v in members(formed))
        held = self.handed if first > self.model.boundary else self.held
        items = [(self.sizes[s], 1 << s, 0) for s in members(live & ~self.reads[node] & ~held)]
        items += [(state_bytes, 0, 1 << i) for i in members(kept & ~(1 << node))]
        items.sort(reverse=True)
        ways = [(over, 0)]  # bytes too many, and what it writes over
        if not live & self.owns[node]:
            ways += [(over - self.sizes[s], 1 << s) for s in self.overs[node] if not held >> s & 1]
        for missing, written in ways:
            for freed, forgotten in _smallest_sets(items, missing):
                gone = freed | written
                left = (live & ~gone | self.owns[node]) & (self.useful[min(following, self.model.nodes)] | self.handed)
                still = (views & ~self._views_of(freed) | self.needs[node]) & ~self._views_of(~left & (live | gone))
                yield (following, left, still, kept & ~forgotten & self.random[following]), node, time

    def _views_of(self, storages: int) -> int:
        views = 0
        for storage in members(storages):
            views |= self.views[storage]
        return views


def _smallest_sets(items: list[tuple[int, int, int]], over: int) -> Iterator[tuple[int, int]]:
    """Sets of items of at least ``over`` bytes of which no part would do: (storages, states) as bit sets."""
    if over <= 0:
        yield 0, 0
        return
    for index, (size, storages, states) in enumerate(items):
        if sum(item[0] for item in items[index:]) < over:
            return
        for more_storages, more_states in _smallest_sets(items[index + 1 :], over - size):
            yield storages | more_storages, states | more_states

"""Every schedule of a tiny graph whose collectives run beside computing, on a clock of its own, apart from ``lowtide.solve``.

A state is what has run, what is live, and how far ahead of computing the collectives are: until when their lane is taken, and
each storage made or read. Best-first search over the time at which computing stands. For graphs whose ops have one storage
each, no workspace, no random ops and no effects.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lowtide.ir import Costs, Graph, Phase
from tests.solve.brute_force import remembered


class State(NamedTuple):
    latest: int  # op that computes
    latest_collective: int
    computed: frozenset[int]
    live: frozenset[int]
    handed: bool
    lane: int  # as the rest, relative to computing
    made: tuple[int, ...]
    read: tuple[int, ...]


def brute_force_beside(graph: Graph, costs: Costs, budget: int) -> int | None:
    """The least time within the budget, ``None`` if nothing fits."""
    assert not costs.workspace_bytes.any()
    assert not any(op.random or op.effect or op.overwrites for op in graph.ops)
    assert all(len(storage.values) == 1 for storage in graph.storages)
    return remembered(Path(__file__), graph, costs, budget, lambda *asked: _Search(*asked).run())


class _Search:
    def __init__(self, graph: Graph, costs: Costs, budget: int | None) -> None:
        assert budget is not None
        self.graph, self.budget = graph, budget
        self.times, self.sizes = costs.time_ns.tolist(), costs.storage_bytes.tolist()
        self.storage = [value.storage for value in graph.values]
        self.outside = {storage.id for storage in graph.storages if storage.external}
        self.results = {self.storage[value] for value in graph.outputs}
        self.handed = {self.storage[value] for value in graph.forward_outputs}

    def run(self) -> int | None:
        nothing = (0,) * len(self.graph.storages)
        start = State(-1, -1, frozenset(), frozenset(self.outside), False, 0, nothing, nothing)
        ticket = itertools.count()
        queue: list[tuple[int, int, State | None]] = [(0, next(ticket), start)]
        met = set()
        while queue:
            now, _, state = heapq.heappop(queue)
            if state is None:
                return now
            if state in met:
                continue
            met.add(state)
            if state.handed and self.results <= state.live:
                heapq.heappush(queue, (now + state.lane, next(ticket), None))
            for passed, after in self._after(state):
                heapq.heappush(queue, (now + passed, next(ticket), after))
        return None

    def _after(self, state: State) -> Iterator[tuple[int, State]]:
        if not state.handed and self.handed <= state.live:
            wait = max((state.made[one] for one in self.handed), default=0)
            yield wait, _later(state, wait)._replace(handed=True)
        for storage in state.live - self.outside - (self.handed if state.handed else set()):
            wait = max(state.made[storage], state.read[storage])
            yield wait, _later(state, wait)._replace(live=state.live - {storage})
        for op in self.graph.ops:
            inputs, (own,) = [self.storage[value] for value in op.inputs], [self.storage[value] for value in op.outputs]
            again = op.id in state.computed
            if not state.live.issuperset(inputs) or own in state.live or (again and op.once):
                continue
            if (not state.handed and op.phase is Phase.BACKWARD) or (
                state.handed and not again and op.phase is Phase.FORWARD
            ):
                continue
            limit = max(state.latest, state.latest_collective) if op.collective else state.latest
            if not again and op.id < limit:
                continue
            live = state.live | {own}
            if self.graph.fixed_bytes + sum(self.sizes[one] for one in live) > self.budget:
                continue
            ran = state._replace(computed=state.computed | {op.id}, live=live)
            if not again:
                early = op.collective and self.outside.issuperset(inputs)
                latest = state.latest if early else op.id
                collective = op.id if op.collective else state.latest_collective
                ran = ran._replace(latest=latest, latest_collective=collective)
            ready = max((state.made[one] for one in inputs), default=0)
            if not op.collective:
                passed = ready + self.times[op.id]
                yield passed, _later(ran, passed)
                continue
            end = max(ready, state.lane) + self.times[op.id]
            made = tuple(end if one == own else at for one, at in enumerate(ran.made))
            read = tuple(end if one in inputs else at for one, at in enumerate(ran.read))
            yield 0, ran._replace(lane=end, made=made, read=read)


def _later(state: State, passed: int) -> State:
    def left(ends: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(end - passed, 0) for end in ends)

    return state._replace(lane=max(state.lane - passed, 0), made=left(state.made), read=left(state.read))

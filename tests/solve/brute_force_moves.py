"""Every order-preserving schedule of a tiny graph that may move storages, on a clock of its own, apart from ``lowtide.solve``.

A state is what was computed, what is live, which copies the second memory holds; a clock says how late it is, until when each
lane is taken, and when what is under way arrives. Best-first search over both, by the time so far and that of the operators
that have yet to run. Of clocks that reach a state one that is nowhere later than another leaves the other out; of schedules
that differ only in when something is freed for nothing, those that free it right after its last use are tried. As in
``brute_force``, what goes to the caller is never freed, so it never moves.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lowtide.ir import Costs, Graph, Phase, SecondMemory
from tests.solve.brute_force import remembered

_NOTHING: frozenset[int] = frozenset()


class State(NamedTuple):
    latest: int
    computed: frozenset[int]
    storages: frozenset[int]
    values: frozenset[int]
    saved: frozenset[int]
    handed: bool
    moved: frozenset[int]  # has been offloaded
    copies: frozenset[int]  # has a copy
    due: frozenset[int]  # has a copy that was not fetched yet


class Clock(NamedTuple):
    """All in nanoseconds from the start. ``leaving``, ``coming``: by storage, when its latest transfer ends."""

    now: int
    lanes: tuple[int, int]
    leaving: tuple[int, ...]
    coming: tuple[int, ...]

    def no_later(self, other: Clock) -> bool:
        mine, theirs = ((*one.lanes, *one.leaving, *one.coming) for one in (self, other))
        return all(end <= max(limit, other.now) for end, limit in zip(mine, theirs, strict=True))


After = tuple[State, Clock, int]
"""What follows a step, and the bytes that are there during it."""


def brute_force_moves(graph: Graph, costs: Costs, budget: int | None) -> int | None:
    """The least time within the budget, ``None`` if nothing fits; with no budget the least peak."""
    return remembered(Path(__file__), graph, costs, budget, lambda *asked: _Search(*asked).run())


class _Search:
    def __init__(self, graph: Graph, costs: Costs, budget: int | None) -> None:
        assert costs.second_memory is not None
        self.graph, self.memory, self.budget = graph, costs.second_memory, budget
        self.times, self.workspaces = costs.time_ns.tolist(), costs.workspace_bytes.tolist()
        self.sizes = [0 if s.external else int(costs.storage_bytes[s.id]) for s in graph.storages]
        self.state_bytes = costs.rng_state_bytes
        self.own = [frozenset(s.id for s in graph.storages if s.base == op.id) for op in graph.ops]
        self.view = [not self.own[op.id] and not op.effect and not op.random for op in graph.ops]
        self.held = {graph.values[value].storage for value in graph.forward_outputs}
        shared = set().union(
            *(self._storages(op.outputs) - self.own[op.id] for op in graph.ops if not self.view[op.id])
        )
        self.own_storages = {s.id for s in graph.storages if not s.external}
        self.movable = self.own_storages - shared
        self.needed = self._needed()

    def _storages(self, values: Iterable[int]) -> set[int]:
        return {self.graph.values[value].storage for value in values}

    def _needed(self) -> set[int]:
        """Operators that every schedule runs, views apart."""
        needed: set[int] = set()
        waiting = [self.graph.values[v].producer for v in (*self.graph.outputs, *self.graph.forward_outputs)]
        waiting += [op.id for op in self.graph.ops if op.effect]
        while waiting:
            op = waiting.pop()
            if op is not None and op not in needed:
                needed.add(op)
                waiting += [self.graph.values[value].producer for value in self.graph.ops[op].inputs]
        return {op for op in needed if not self.view[op]}

    def run(self) -> int | None:
        external = frozenset(storage.id for storage in self.graph.storages if storage.external)
        outside = frozenset(value.id for value in self.graph.values if value.producer is None)
        nowhere = (0,) * len(self.graph.storages)
        start = State(-1, _NOTHING, external, outside, _NOTHING, False, _NOTHING, _NOTHING, _NOTHING)
        ticket = itertools.count()
        queue: list[tuple[int, int, State | None, Clock]] = [(0, 0, start, Clock(0, (0, 0), nowhere, nowhere))]
        met: dict[State, list[Clock]] = {}
        while queue:
            cost, _, state, clock = heapq.heappop(queue)
            if state is None:
                return max(cost, self.graph.fixed_bytes) if self.budget is None else cost
            clocks = met.setdefault(state, [])
            if any(one.no_later(clock) for one in clocks):
                continue
            clocks.append(clock)
            if self._done(state):
                end = max(clock.now, *clock.lanes) if self.budget is not None else cost
                heapq.heappush(queue, (end, next(ticket), None, clock))
            for after, later, size in self._after(state, clock):
                if self.budget is None:
                    heapq.heappush(queue, (max(cost, size), next(ticket), after, clock))
                elif size <= self.budget:
                    least = later.now + sum(self.times[op] for op in self.needed - after.computed)
                    heapq.heappush(queue, (least, next(ticket), after, later))
        return None

    def _done(self, state: State) -> bool:
        effects = all(op.id in state.computed for op in self.graph.ops if op.effect)
        return state.handed and effects and not state.due and state.values.issuperset(self.graph.outputs)

    def _after(self, state: State, clock: Clock) -> Iterator[After]:
        if not state.handed and state.values.issuperset(self.graph.forward_outputs):
            arrival = max((clock.coming[storage] for storage in self.held), default=0)
            yield state._replace(handed=True), clock._replace(now=max(clock.now, arrival)), 0
        for op in state.saved:
            yield state._replace(saved=state.saved - {op}), clock, 0
        for storage in (state.moved & state.storages) - self._handed(state):
            yield self._freed(state, storage), self._arrived(clock, storage), 0
        for storage in self.movable - self._handed(state):
            yield from self._offload(state, clock, storage)
            yield from self._fetch(state, clock, storage)
        for op in range(len(self.graph.ops)):
            for after, later, size in self._compute(state, clock, op):
                touched = self._storages((*self.graph.ops[op].inputs, *self.graph.ops[op].outputs))
                idle = sorted((touched & self.own_storages & after.storages) - self._handed(after) - after.moved)
                for count in range(len(idle) + 1):
                    for gone in itertools.combinations(idle, count):
                        left = after
                        for storage in gone:
                            left = self._freed(left, storage)
                        yield left, later, size

    def _handed(self, state: State) -> set[int]:
        return self.held if state.handed else set()

    def _freed(self, state: State, storage: int) -> State:
        gone = frozenset(self.graph.storages[storage].values)
        return state._replace(storages=state.storages - {storage}, values=state.values - gone)

    def _arrived(self, clock: Clock, storage: int) -> Clock:
        """When nothing of the storage is under way any more."""
        return clock._replace(now=max(clock.now, clock.leaving[storage], clock.coming[storage]))

    def _offload(self, state: State, clock: Clock, storage: int) -> Iterator[After]:
        room = self.memory.capacity_bytes
        held = sum(self.sizes[other] for other in state.copies) + self.sizes[storage]
        if storage in state.moved or storage not in state.storages or (room is not None and held > room):
            return
        more = frozenset({storage})
        after = state._replace(moved=state.moved | more, copies=state.copies | more, due=state.due | more)
        yield after, self._transfer(self._arrived(clock, storage), storage, back=False), 0

    def _fetch(self, state: State, clock: Clock, storage: int) -> Iterator[After]:
        if storage not in state.copies or storage in state.storages:
            return
        base = self.graph.storages[storage].base
        back = [v for v in self.graph.storages[storage].values if self.graph.values[v].producer == base]
        after = state._replace(
            storages=state.storages | {storage}, values=state.values.union(back), due=state.due - {storage}
        )
        later, size = self._transfer(self._arrived(clock, storage), storage, back=True), self._bytes(after)
        yield after, later, size
        if self.memory.capacity_bytes is not None:  # the last fetch, after which the copy takes no room
            yield after._replace(copies=after.copies - {storage}), later, size

    def _transfer(self, clock: Clock, storage: int, *, back: bool) -> Clock:
        size, lanes = self.sizes[storage], list(clock.lanes)
        start = max(clock.now, *lanes) if self.memory.shared else max(clock.now, lanes[back])
        rate = self.memory.fetch_bytes_per_second if back else self.memory.offload_bytes_per_second
        end = lanes[back] = start + self.memory.latency_ns + (size * 10**9 + rate - 1) // rate
        ends = list(clock.coming if back else clock.leaving)
        ends[storage] = end
        clock = clock._replace(lanes=(lanes[0], lanes[1]))
        return clock._replace(coming=tuple(ends)) if back else clock._replace(leaving=tuple(ends))

    def _compute(self, state: State, clock: Clock, op_id: int) -> Iterator[After]:
        """One step, once for every storage that it may write over."""
        op, own = self.graph.ops[op_id], self.own[op_id]
        again, view = op_id in state.computed, self.view[op_id]
        if not state.values.issuperset(op.inputs) or (again and not op.recomputable):
            return
        if (again and op.random and op_id not in state.saved) or (not state.handed and op.phase is Phase.BACKWARD):
            return
        if not again and not view and (op_id < state.latest or (state.handed and op.phase is Phase.FORWARD)):
            return
        if self._storages(op.outputs) - own - state.storages:
            return
        arrival = max((clock.coming[s] for s in self._storages((*op.inputs, *op.outputs))), default=0)
        begun = clock._replace(now=max(clock.now, arrival))
        for saves in (False, True) if op.random and not again else (False,):
            saved = state._replace(saved=state.saved | {op_id} if saves else state.saved)
            size = self._bytes(saved) + sum(self.sizes[s] for s in own) + self.workspaces[op_id]
            after = saved._replace(
                latest=state.latest if again or view else op_id,
                computed=state.computed if view else state.computed | {op_id},
                storages=state.storages | own,
                values=state.values.union(op.outputs),
            )
            yield after, begun._replace(now=begun.now + self.times[op_id]), size
            for storage in self._storages(op.overwrites) - self._handed(state) if not own & state.storages else ():
                over = self._arrived(begun, storage)
                over = over._replace(now=over.now + self.times[op_id])
                yield self._freed(after, storage), over, size - self.sizes[storage]

    def _bytes(self, state: State) -> int:
        states = len(state.saved) * self.state_bytes
        return self.graph.fixed_bytes + states + sum(self.sizes[storage] for storage in state.storages)


def memory_like(costs: Costs, percent: int, *, latency_ns: int = 0, shared: bool = False) -> SecondMemory:
    """One that takes for a storage of mean size so many percent of an operator's mean time."""
    rate = 100 * int(costs.storage_bytes.sum()) * len(costs.time_ns) * 10**9
    rate //= max(percent * int(costs.time_ns.sum()) * len(costs.storage_bytes), 1)
    return SecondMemory(max(rate, 1), max(rate, 1), latency_ns, shared=shared)

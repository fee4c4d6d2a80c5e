"""When transfers run, and collectives beside computing: a schedule that frees what they need as soon as it can, and begins them
as late as it can, is given the room that the budget leaves.

1. What fits anyway is not moved: where a storage could stay until it is read again, it does.
2. What was offloaded stays until its copy is complete, and what a collective reads until that has ended, instead of being
   waited for, while there is room for it; what was to be written over it has memory of its own.
3. What is fetched or gathered begins to come as early as there is room for it, or just in time, in the order in which it is
   read, but no earlier than what is before it on its lane lets it (``lowtide.solve.moving.early``).

Bytes only move into room that the schedule leaves: a peak within the budget stays there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from lowtide.ir import (
    Clock,
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Offload,
    RestoreRng,
    SaveRng,
    Schedule,
    Step,
    simulate,
)
from lowtide.solve.moving.early import is_due, with_early

Levels = npt.NDArray[np.int64]
_BUFFERS = (0, 1, 2, 4)  # times the largest storage that moves: room that is left to transfers


def place_transfers(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with its transfers, and collectives that run beside computing, where they are waited for least, and without
    transfers that are needless.

    Room that storages stay in is none that transfers could hide in: several divisions of it are tried."""
    if not (schedule.moves or costs.collectives_beside):
        return schedule
    best, best_run = schedule, simulate(graph, costs, schedule)
    most = max(budget_bytes, best_run.peak_bytes)
    for placed in _placed(graph, costs, schedule, budget_bytes):
        run = simulate(graph, costs, placed)
        if run.peak_bytes <= most and run.time_ns <= best_run.time_ns:
            better = best is schedule or run.time_ns < best_run.time_ns
            best, best_run = (placed, run) if better else (best, best_run)
        if best is not schedule and best_run.timing.wait_ns == 0:
            break  # nothing is waited for
    return best


def _placed(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Iterator[Schedule]:
    largest = max(
        (int(costs.storage_bytes[one.storage]) for one in schedule.steps if isinstance(one, Offload)), default=0
    )
    levels = simulate(graph, costs, schedule).timeline

    for buffers in _BUFFERS if largest else (0,):
        kept = _without_needless(graph, costs, schedule, levels.copy(), budget_bytes - buffers * largest)
        late = _used(_LateFrees(graph, costs, kept, budget_bytes).run())
        yield with_early(graph, costs, late, budget_bytes)
        if costs.collectives_beside:
            yield late
            yield with_early(graph, costs, late, budget_bytes, just_in_time=True)
            early = with_early(graph, costs, kept, budget_bytes, just_in_time=True)
            yield _used(_LateFrees(graph, costs, early, budget_bytes).run())


def _without_needless(graph: Graph, costs: Costs, schedule: Schedule, levels: Levels, budget_bytes: int) -> Schedule:
    """Storages stay that there is room for until they are read again, the largest first; not those that are written over.
    ``levels``: bytes by step, to which those of what stays are added."""
    sizes, owned = costs.storage_bytes.tolist(), graph.owned
    freed: dict[int, int] = {}
    gaps = []
    over: set[int] = set()  # storages that were written over where they were freed last
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            over.difference_update(owned[step.op])
            over.update(() if step.into is None else (step.into,))
        elif isinstance(step, Free):
            freed[step.storage] = index
        elif isinstance(step, Fetch):
            if step.storage not in over:
                gaps.append((-sizes[step.storage], freed[step.storage], index))
            over.discard(step.storage)
    dropped: set[int] = set()
    for less, first, last in sorted(gaps):
        if levels[first + 1 : last].max(initial=0) - less <= budget_bytes:
            levels[first + 1 : last] -= less
            dropped |= {first, last}
    return _used(_without(schedule, dropped))


def _used(schedule: Schedule) -> Schedule:
    """Without copies that nobody fetches."""
    fetched = {step.storage for step in schedule.steps if isinstance(step, Fetch)}
    useless = {
        index for index, step in enumerate(schedule.steps) if isinstance(step, Offload) and step.storage not in fetched
    }
    return _without(schedule, useless)


def _without(schedule: Schedule, dropped: set[int]) -> Schedule:
    if not dropped:
        return schedule
    steps = tuple(step for index, step in enumerate(schedule.steps) if index not in dropped)
    return Schedule(steps, schedule.boundary - sum(index < schedule.boundary for index in dropped))


class _LateFrees:
    """Runs the schedule on the clock; what is freed while it is read beside computing waits for room to become scarce."""

    def __init__(self, graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> None:
        self.schedule, self.budget_bytes = schedule, budget_bytes
        self.levels = simulate(graph, costs, schedule).timeline.tolist()
        self.sizes = costs.storage_bytes.tolist()
        self.owned = graph.owned
        self.steps: list[Step] = []
        self.clock = Clock(graph, costs)
        self.waiting: list[tuple[int, int]] = []  # when it is no longer read, storage: freed, but still there
        self.there = 0  # bytes of these
        self.written: set[int] = set()  # storages that were written over, and whose frees follow

    def run(self) -> Schedule:
        steps, boundary = self.schedule.steps, 0
        for index, step in enumerate(steps):
            if not is_due(self.schedule, index):
                self._release(self._level(index), self._made_by(index))
            if index == self.schedule.boundary:
                boundary = len(self.steps)
                self.clock.hand_over()
            if (
                isinstance(step, Free)
                and self._ready(step.storage) > self.clock.now
                and step.storage not in self.written
            ):
                heapq.heappush(self.waiting, (self._ready(step.storage), step.storage))
                self.there += self.sizes[step.storage]
            elif isinstance(step, Fetch) and (entry := (self._ready(step.storage), step.storage)) in self.waiting:
                self.waiting.remove(entry)  # it never left
                heapq.heapify(self.waiting)
                self.there -= self.sizes[step.storage]
            else:
                self._take(self._apart(step, index))
        self._release(None, ())
        return Schedule(tuple(self.steps), boundary if self.schedule.boundary < len(steps) else len(self.steps))

    def _ready(self, storage: int) -> int:
        """When nothing beside computing needs the storage any more."""
        return self.clock.ready((), (storage,))

    def _apart(self, step: Step, index: int) -> Step:
        """A compute that is to write over what is being copied has memory of its own, if there is room."""
        if not isinstance(step, Compute) or step.into is None or self._ready(step.into) <= self.clock.now:
            return step
        fits = self.levels[index] + self.there + self.sizes[step.into] <= self.budget_bytes
        return Compute(step.op) if fits else step

    def _level(self, index: int) -> int:
        """The bytes that are there before a place comes at which something can be freed again."""
        level: int = self.levels[index]
        while index + 1 < len(self.levels) and is_due(self.schedule, index + 1):
            index += 1
            level = max(level, self.levels[index])
        return level

    def _made_by(self, index: int) -> Collection[int]:
        """The storages that are computed before a place comes at which something can be freed again."""
        while index + 1 < len(self.levels) and isinstance(self.schedule.steps[index], (SaveRng, RestoreRng)):
            index += 1
        step = self.schedule.steps[index]
        return self.owned[step.op] if isinstance(step, Compute) else ()

    def _release(self, level: int | None, made: Collection[int]) -> None:
        """Free what has been copied, what there is no room for beside ``level`` bytes, and what is ``made`` anew."""
        while self.waiting:
            end, storage = self.waiting[0]
            again = any(one in made for _, one in self.waiting)
            if level is not None and end > self.clock.now and level + self.there <= self.budget_bytes and not again:
                return
            heapq.heappop(self.waiting)
            self.there -= self.sizes[storage]
            self._take(Free(storage))

    def _take(self, step: Step) -> None:
        self.steps.append(step)
        self.clock.take(step)
        if isinstance(step, Compute) and step.into is not None:
            self.written.add(step.into)
        elif isinstance(step, Free):
            self.written.discard(step.storage)

"""When transfers run: a schedule that frees what it offloads as soon as it can, and fetches as late as it can, is given the
room that the budget leaves.

1. What fits anyway is not moved: where a storage could stay until it is read again, it does.
2. What was offloaded stays until its copy is complete, instead of being waited for, while there is room for it; what was to be
   written over it has memory of its own.
3. What is fetched begins to come back as early as there is room for it, in the order in which it is read, but no earlier than
   the transfer before it lets it.

Bytes only move into room that the schedule leaves: a peak within the budget stays there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Offload,
    RestoreRng,
    SaveRng,
    Schedule,
    SecondMemory,
    Step,
    owned_storages,
    simulate,
    timing,
)

Indices = npt.NDArray[np.intp]
Levels = npt.NDArray[np.int64]
_BUFFERS = (0, 1, 2, 4)  # times the largest storage that moves: room that is left to transfers
_AT_ONCE = 2**60  # bytes per second


def place_transfers(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with its transfers where they are waited for least, and without those that are needless.

    Room that storages stay in is none that transfers could hide in: several divisions of it are tried."""
    memory = costs.second_memory
    if memory is None or not schedule.moves:
        return schedule
    largest = max(int(costs.storage_bytes[step.storage]) for step in schedule.steps if isinstance(step, Offload))
    levels = simulate(graph, costs, schedule).timeline

    def placed(buffers: int) -> Schedule:
        kept = _without_needless(graph, costs, schedule, levels.copy(), budget_bytes - buffers * largest)
        late = _LateFrees(graph, costs, memory, kept, budget_bytes).run()
        return _with_early_fetches(graph, costs, memory, _used(late), budget_bytes)

    return min(map(placed, _BUFFERS), key=lambda one: timing(graph, costs, one).time_ns)


def _without_needless(graph: Graph, costs: Costs, schedule: Schedule, levels: Levels, budget_bytes: int) -> Schedule:
    """Storages stay that there is room for until they are read again, the largest first; not those that are written over.
    ``levels``: bytes by step, to which those of what stays are added."""
    sizes, owned = costs.storage_bytes.tolist(), owned_storages(graph)
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
    """Runs the schedule on the clock; what is freed while its copy is under way waits for room to become scarce."""

    def __init__(self, graph: Graph, costs: Costs, memory: SecondMemory, schedule: Schedule, budget_bytes: int) -> None:
        self.schedule, self.memory, self.budget_bytes = schedule, memory, budget_bytes
        self.levels = simulate(graph, costs, schedule).timeline.tolist()
        self.times, self.sizes = costs.time_ns.tolist(), costs.storage_bytes.tolist()
        self.owned = owned_storages(graph)
        self.steps: list[Step] = []
        self.now = 0
        self.lane = 0  # when the latest copy is complete
        self.ends: dict[int, int] = {}  # storage -> when its copy is complete
        self.waiting: list[tuple[int, int]] = []  # when its copy is complete, storage: freed, but still there
        self.there = 0  # bytes of these
        self.written: set[int] = set()  # storages that were written over, and whose frees follow

    def run(self) -> Schedule:
        steps, boundary = self.schedule.steps, 0
        for index, step in enumerate(steps):
            if not _is_due(self.schedule, index):
                self._release(self._level(index), self._made_by(index))
            if index == self.schedule.boundary:
                boundary = len(self.steps)
            if (
                isinstance(step, Free)
                and self.ends.get(step.storage, 0) > self.now
                and step.storage not in self.written
            ):
                heapq.heappush(self.waiting, (self.ends[step.storage], step.storage))
                self.there += self.sizes[step.storage]
            elif isinstance(step, Fetch) and (entry := (self.ends.get(step.storage, 0), step.storage)) in self.waiting:
                self.waiting.remove(entry)  # it never left
                heapq.heapify(self.waiting)
                self.there -= self.sizes[step.storage]
            else:
                self._take(self._apart(step, index))
        self._release(None, ())
        return Schedule(tuple(self.steps), boundary if self.schedule.boundary < len(steps) else len(self.steps))

    def _apart(self, step: Step, index: int) -> Step:
        """A compute that is to write over what is being copied has memory of its own, if there is room."""
        if not isinstance(step, Compute) or step.into is None or self.ends.get(step.into, 0) <= self.now:
            return step
        fits = self.levels[index] + self.there + self.sizes[step.into] <= self.budget_bytes
        return Compute(step.op) if fits else step

    def _level(self, index: int) -> int:
        """The bytes that are there before a place comes at which something can be freed again."""
        level: int = self.levels[index]
        while index + 1 < len(self.levels) and _is_due(self.schedule, index + 1):
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
            if level is not None and end > self.now and level + self.there <= self.budget_bytes and not again:
                return
            heapq.heappop(self.waiting)
            self.there -= self.sizes[storage]
            self._take(Free(storage))

    def _take(self, step: Step) -> None:
        self.steps.append(step)
        if isinstance(step, Compute):
            if step.into is not None:
                self.now = max(self.now, self.ends.get(step.into, 0))
                self.written.add(step.into)
            self.now += self.times[step.op]
        elif isinstance(step, Offload):
            self.lane = max(self.lane, self.now) + self.memory.offload_ns(self.sizes[step.storage])
            self.ends[step.storage] = self.lane
        elif isinstance(step, Free):
            self.now = max(self.now, self.ends.get(step.storage, 0))
            self.written.discard(step.storage)


def _with_early_fetches(
    graph: Graph, costs: Costs, memory: SecondMemory, schedule: Schedule, budget_bytes: int
) -> Schedule:
    at_once = replace(costs, second_memory=replace(memory, fetch_bytes_per_second=_AT_ONCE))
    run = simulate(graph, at_once, schedule)
    levels, starts = run.timeline.copy(), np.array([*run.timing.start_ns, run.time_ns])
    sizes = costs.storage_bytes.tolist()
    free: Indices = np.flatnonzero([_may_precede(schedule, index) for index in range(len(schedule.steps))])
    moved: dict[int, list[int]] = {}  # index -> the fetches that come before the step there
    freed: dict[int, int] = {}
    lane = first = 0
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            freed[step.storage] = index
        if not isinstance(step, Fetch):
            continue
        size = sizes[step.storage]
        low = max(first, freed[step.storage] + 1)
        full = np.flatnonzero(levels[low:index] + size > budget_bytes)
        low = low + int(full[-1]) + 1 if len(full) else low
        idle = int(np.searchsorted(starts, lane, side="right")) - 1  # the step during which the lane becomes free
        place = _next(free, max(low, min(idle, index)), index)
        moved.setdefault(place, []).append(index)
        levels[place:index] += size
        lane = max(lane, int(starts[place])) + memory.fetch_ns(size)
        first = place
    return _reordered(schedule, moved)


def _may_precede(schedule: Schedule, index: int) -> bool:
    """Whether a fetch may come before the step: not between a generator state and its compute, nor before a free."""
    return not _is_due(schedule, index) and not isinstance(schedule.steps[index], Free)


def _is_due(schedule: Schedule, index: int) -> bool:
    """Whether the step is a compute that must follow the one before, which is of its generator state."""
    return index > 0 and isinstance(schedule.steps[index - 1], (SaveRng, RestoreRng))


def _next(free: Indices, low: int, high: int) -> int:
    """The first place from ``low`` on, ``high`` at the latest."""
    found = int(np.searchsorted(free, low))
    return min(int(free[found]), high) if found < len(free) else high


def _reordered(schedule: Schedule, moved: dict[int, list[int]]) -> Schedule:
    steps: list[Step] = []
    boundary = len(schedule.steps)
    for index, step in enumerate(schedule.steps):
        if index == schedule.boundary:
            boundary = len(steps)
        steps += [schedule.steps[one] for one in moved.get(index, ())]
        if not isinstance(step, Fetch):
            steps.append(step)
    return Schedule(tuple(steps), boundary)

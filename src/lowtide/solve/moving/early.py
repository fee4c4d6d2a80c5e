"""Earlier places for what runs beside computing: transfers back, and collectives.

One pass over the schedule, in the order in which things are asked for. Each moves to the first place at which

- there is room for what it makes, from there to its old place;
- all that it needs is there, and what it makes was freed;
- what was before it on its lane is before it still, so that the order of collectives stays;
- its lane is about to become free; with ``just_in_time``, is about to be used where all that follow are to end when they are
  needed: what comes no earlier than that leaves its room to others.

A collective moves within its pass: one that needs nothing of the program (``may_run_early``) up to the last effect before it,
others only where they run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Lane,
    RestoreRng,
    SaveRng,
    Schedule,
    Step,
    may_run_early,
    simulate,
)
from lowtide.ir.graph import OPTIMIZER_TARGET, TANGENT_TARGET

Indices = npt.NDArray[np.intp]
_AT_ONCE = 2**60  # bytes per second
_ATTEMPTS, _WORK = 2000, 400_000  # moves that are tried at most, and steps of schedules that are simulated for it
_EACH = 16  # places up to which each is tried


class Item(NamedTuple):
    """The step at ``position`` runs on ``lane`` for so long, makes so many bytes, and can come before any step from ``low`` on,
    as far as what it needs is concerned."""

    position: int
    lane: Lane
    time_ns: int
    bytes: int
    low: int


def with_early(
    graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int, *, just_in_time: bool = False
) -> Schedule:
    """``schedule`` with transfers back, and collectives that run beside computing, as early as fits."""
    items = movable(graph, costs, schedule)
    if not items:
        return schedule
    run = simulate(graph, _at_once(graph, costs), schedule)
    levels, starts = simulate(graph, costs, schedule).timeline.copy(), np.array([*run.timing.start_ns, run.time_ns])
    latest = _latest_starts(items, starts) if just_in_time else [0] * len(items)
    free: Indices = np.flatnonzero([may_precede(schedule, index) for index in range(len(schedule.steps))])
    moved: dict[int, list[int]] = {}  # index -> the steps that come before the step there
    ends, first = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
    for item, late in zip(items, latest, strict=True):
        low, index = max(item.low, first[item.lane]), item.position
        full = np.flatnonzero(levels[low:index] + item.bytes > budget_bytes)
        low = low + int(full[-1]) + 1 if len(full) else low
        idle = (
            int(np.searchsorted(starts, max(ends[item.lane], late), side="right")) - 1
        )  # during which its lane is free
        place = _next(free, max(low, min(idle, index)), index)
        stays = place == index and item.lane is Lane.COLLECTIVE  # and what it writes over is freed next
        if not stays:
            moved.setdefault(place, []).append(index)
        levels[place:index] += item.bytes
        ends[item.lane] = max(ends[item.lane], int(starts[place])) + item.time_ns
        first[item.lane] = place + stays
    return reordered(schedule, moved)


def _at_once(graph: Graph, costs: Costs) -> Costs:
    """Costs by which nothing beside computing is waited for."""
    memory = costs.second_memory
    memory = None if memory is None else replace(memory, fetch_bytes_per_second=_AT_ONCE)
    beside = [op.id for op in graph.ops if op.collective and costs.collectives_beside]
    times = costs.time_ns.copy()
    times[beside] = 0
    return replace(costs, second_memory=memory, time_ns=times)


def _latest_starts(items: list[Item], starts: npt.NDArray[np.int64]) -> list[int]:
    """When each has to begin so that it, and all that follow on its lane, end where they stand now."""
    after: dict[Lane, int] = {}
    found = []
    for item in reversed(items):
        due = int(starts[item.position])
        after[item.lane] = min(due, after.get(item.lane, due)) - item.time_ns
        found.append(after[item.lane])
    return found[::-1]


def movable(graph: Graph, costs: Costs, schedule: Schedule) -> list[Item]:
    """What runs beside computing and can come earlier, and the collectives that cannot, which others stay behind."""
    return _Items(graph, costs).of(schedule)


class _Items:
    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.memory = graph, costs.second_memory
        self.beside = costs.collectives_beside
        self.times, self.sizes = costs.time_ns.tolist(), costs.storage_bytes.tolist()
        self.workspaces = costs.workspace_bytes.tolist()
        self.owned = graph.owned

    def of(self, schedule: Schedule) -> list[Item]:
        found = []
        freed: dict[int, int] = {}  # storage -> after its latest free
        made: dict[int, int] = {}  # value -> after the step that made it last
        computed: set[int] = set()
        effect = 0  # after the latest effect that a collective stays behind
        for index, step in enumerate(schedule.steps):
            if isinstance(step, Free):
                freed[step.storage] = index + 1
            elif isinstance(step, Fetch):
                found.append(self._fetch(step, index, freed[step.storage]))
                made.update(dict.fromkeys(self.graph.storages[step.storage].values, index + 1))
            elif isinstance(step, Compute):
                op = self.graph.ops[step.op]
                if op.collective and self.beside:
                    there = [made.get(value, 0) for value in op.inputs]
                    gone = [freed.get(storage, 0) for storage in self.owned[op.id]]
                    least = [*there, *gone, schedule.boundary if index >= schedule.boundary else 0]
                    first = op.id not in computed
                    moves = may_run_early(self.graph, op) if first else op.recomputable and not op.random
                    moves = moves and step.into is None and bool(gone)
                    low = max([*least, effect if first else 0]) if moves else index
                    found.append(self._collective(step, index, low))
                if op.effect and op.target not in (TANGENT_TARGET, OPTIMIZER_TARGET):
                    effect = index + 1
                computed.add(op.id)
                made.update(dict.fromkeys(op.outputs, index + 1))
                made.update(dict.fromkeys(op.inputs if op.effect else (), index + 1))
        return found

    def _fetch(self, step: Fetch, index: int, low: int) -> Item:
        assert self.memory is not None
        size = self.sizes[step.storage]
        return Item(index, Lane.FETCH, self.memory.fetch_ns(size), size, low)

    def _collective(self, step: Compute, index: int, low: int) -> Item:
        size = self.workspaces[step.op] + sum(self.sizes[storage] for storage in self.owned[step.op])
        return Item(index, Lane.COLLECTIVE, self.times[step.op], size, low)


def may_precede(schedule: Schedule, index: int) -> bool:
    """Whether a step may be put before this one: not between a generator state and its compute, nor before a free."""
    return not is_due(schedule, index) and not isinstance(schedule.steps[index], Free)


def is_due(schedule: Schedule, index: int) -> bool:
    """Whether the step is a compute that must follow the one before, which is of its generator state."""
    return index > 0 and isinstance(schedule.steps[index - 1], (SaveRng, RestoreRng))


def _next(free: Indices, low: int, high: int) -> int:
    """The first place from ``low`` on, ``high`` at the latest."""
    found = int(np.searchsorted(free, low))
    return min(int(free[found]), high) if found < len(free) else high


def reordered(schedule: Schedule, moved: dict[int, list[int]]) -> Schedule:
    """With the steps of each list before the step at its key."""
    steps: list[Step] = []
    boundary = len(schedule.steps)
    taken = {index for indices in moved.values() for index in indices}
    for index, step in enumerate(schedule.steps):
        if index == schedule.boundary:
            boundary = len(steps)
        steps += [schedule.steps[one] for one in moved.get(index, ())]
        if index not in taken:
            steps.append(step)
    return Schedule(tuple(steps), boundary)


def improved(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` after moves of single collectives to earlier places, each of which the clock finds to help."""
    best = simulate(graph, costs, schedule)
    left = min(_ATTEMPTS, _WORK // max(len(schedule.steps), 1))
    while left > 0:
        found = schedule
        for moved in _moves(graph, costs, schedule):
            left -= 1
            run = simulate(graph, costs, moved)
            if run.peak_bytes <= budget_bytes and run.time_ns < best.time_ns:
                found, best = moved, run
            if left <= 0:
                break
        if found is schedule:
            break
        schedule = found
    return schedule


def _moves(graph: Graph, costs: Costs, schedule: Schedule) -> Iterator[Schedule]:
    """Every collective a few places earlier, and twice as many, and so on, those before it on its lane no later than it."""
    items = [item for item in movable(graph, costs, schedule) if item.lane is Lane.COLLECTIVE]
    for number, item in enumerate(items):
        distance = 1
        while item.position - distance >= item.low:
            place = item.position - distance
            before = [one for one in items[:number] if one.position >= place]
            if all(one.low <= place for one in before) and may_precede(schedule, place):
                yield reordered(schedule, {place: [one.position for one in (*before, item)]})
            distance += 1 if distance < _EACH else distance

"""Schedules with things under way beside computing, told apart from ``lowtide.ir.transfers``: every pair of steps is compared,
and storages are told apart by their lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.ir import Compute, Costs, Fetch, Free, Graph, Offload, Schedule, is_view


@dataclass
class Task:
    """What one step does: which lives of storages it looks at, which it must have for itself, when it runs."""

    lane: str  # empty for what computing waits for
    duration: int
    looks: set[tuple[int, int]] = field(default_factory=set)
    alone: set[tuple[int, int]] = field(default_factory=set)
    asked: int = 0
    begin: int = 0
    end: int = 0

    def after(self, other: Task) -> bool:
        """Whether it cannot begin before the earlier ``other`` has ended."""
        return bool(self.alone & (other.looks | other.alone) or self.looks & other.alone)


def tasks_of(graph: Graph, costs: Costs, schedule: Schedule) -> list[Task]:
    """One for each step, and one for the boundary before its step, not yet timed."""
    lives = dict.fromkeys(range(len(graph.storages)), 0)
    live = {storage.id for storage in graph.storages if storage.external}
    tasks: list[Task] = []

    def now(values: tuple[int, ...]) -> set[tuple[int, int]]:
        return {(graph.values[value].storage, lives[graph.values[value].storage]) for value in values}

    def renew(storage: int) -> None:
        if storage not in live:
            lives[storage] += 1
            live.add(storage)

    for index, step in enumerate((*schedule.steps, None)):
        if index == schedule.boundary:
            tasks.append(Task("", 0, now(graph.forward_outputs)))
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            read = now(op.inputs)
            over = set() if step.into is None else {(step.into, lives[step.into])}
            own = [storage.id for storage in graph.storages if storage.base == op.id]
            if step.into is not None:
                live.discard(step.into)
                lives[step.into] += 1
            for storage in own:
                renew(storage)
            made = now(op.outputs)
            beside = op.collective and costs.collectives_beside
            task = Task("collective" if beside else "", int(costs.time_ns[op.id]), read - over, over)
            mine = {one for one in made if one[0] in own}
            if is_view(graph, op):
                task.looks |= made
            else:
                task.alone |= (made - mine) | (read if op.effect else set())
            if beside:
                task.alone |= mine
            else:
                task.looks |= mine
            tasks.append(task)
        elif isinstance(step, Free):
            tasks.append(Task("", 0, alone={(step.storage, lives[step.storage])}))
            live.discard(step.storage)
        elif isinstance(step, Offload):
            assert costs.second_memory is not None
            duration = costs.second_memory.offload_ns(int(costs.storage_bytes[step.storage]))
            tasks.append(Task("out", duration, {(step.storage, lives[step.storage])}))
        elif isinstance(step, Fetch):
            assert costs.second_memory is not None
            renew(step.storage)
            duration = costs.second_memory.fetch_ns(int(costs.storage_bytes[step.storage]))
            tasks.append(Task("in", duration, alone={(step.storage, lives[step.storage])}))
        elif step is not None:
            tasks.append(Task("", 0))
    return tasks


def run_tasks(tasks: list[Task], shared: bool = False) -> int:
    """When the last has ended; times are put into the tasks."""
    computed = 0
    for index, task in enumerate(tasks):
        before = tasks[:index]
        task.asked = computed
        task.begin = max([computed, *(one.end for one in before if task.after(one))])
        if task.lane:
            same = ("in", "out") if shared and task.lane in ("in", "out") else (task.lane,)
            task.begin = max([task.begin, *(one.end for one in before if one.lane in same)])
        else:
            task.asked = task.begin
            computed = task.begin + task.duration
        task.end = task.begin + task.duration
    return max(task.end for task in tasks)

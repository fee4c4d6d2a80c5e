"""Follows the schedule of a cycle while the program repeats it: which storages to evict and which to recompute before each
operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.dynamic.cycles import CycleGraph
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import Node
from lowtide.dynamic.rebuild import Rebuilder
from lowtide.ir import Compute, Free
from lowtide.ir.schedule import Step
from lowtide.planning import Plan


class Action(NamedTuple):
    """Recompute (``again``) or else evict the results ``which`` of the program's operator number ``operator``."""

    operator: int
    which: tuple[int, ...]
    again: bool


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """A plan in terms of the program's operators. ``before``: the actions before an operator, by its number. ``kept``: results
    held although the program releases them, as (operator number, index of the result). ``peak_bytes``: the plan's peak.
    ``rebuild_ns``: time that the plan spends on recomputation."""

    before: dict[int, list[Action]]
    kept: frozenset[tuple[int, int]]
    peak_bytes: int
    rebuild_ns: int

    @staticmethod
    def of(cycle: CycleGraph, plan: Plan) -> Guide:
        """Translate a plan for this cycle into a guide."""
        reader = _Reader(cycle)
        reader.read(plan.schedule.steps)
        rebuild_ns = plan.time_ns - cycle.costs.total_time_ns
        return Guide(reader.before, frozenset(reader.kept), plan.peak_bytes, rebuild_ns)


class _Reader:
    def __init__(self, cycle: CycleGraph) -> None:
        self.cycle = cycle
        self.before: dict[int, list[Action]] = {}
        self.kept: set[tuple[int, int]] = set()
        self.next = 0  # number of the program's operator that comes next

    def read(self, steps: Sequence[Step]) -> None:
        computed: set[int] = set()
        for index, step in enumerate(steps):
            if isinstance(step, Free):
                self._free(step.storage)
            elif isinstance(step, Compute):
                operator = self.cycle.operators[step.op]
                if step.op not in computed:
                    computed.add(step.op)
                    self.next = self.next if operator is None else operator + 1
                elif operator is not None:
                    self._again(step.op, operator, _freed_after(steps, index))

    def _again(self, op: int, operator: int, freed: set[int]) -> None:
        graph = self.cycle.graph
        wanted = [graph.values[value].storage for value in graph.ops[op].outputs]
        results = [self.cycle.results[storage] for storage in wanted if storage not in freed]
        self._add(Action(operator, tuple(result[1] for result in results if result is not None), True))

    def _free(self, storage: int) -> None:
        result, released = self.cycle.results[storage], self.cycle.released[storage]
        if result is None:
            return
        if released is not None and released < self.next:
            self.kept.add(result)
        self._add(Action(result[0], result[1:], False))

    def _add(self, action: Action) -> None:
        if action.which:
            self.before.setdefault(self.next, []).append(action)


def _freed_after(steps: Sequence[Step], index: int) -> set[int]:
    """Return the storages freed directly after the step at ``index``."""
    freed = set()
    while index + 1 < len(steps) and isinstance(step := steps[index + 1], Free):
        freed.add(step.storage)
        index += 1
    return freed


class Follower:
    """Performs the actions of a guide in a running cycle, as far as possible. ``made``: for each operator so far, its
    recomputable results."""

    def __init__(self, guide: Guide, memory: Memory, rebuilder: Rebuilder, made: list[tuple[Node, ...]]) -> None:
        self.guide = guide
        self.memory = memory
        self.rebuilder = rebuilder
        self.made = made
        self._kept: list[Node] = []

    def before(self, operator: int) -> None:
        """Perform the actions due before this operator, by its number."""
        for action in self.guide.before.get(operator, ()):
            if action.operator >= len(self.made):
                continue
            results = self.made[action.operator]
            nodes = [results[place] for place in action.which if place < len(results)]
            if action.again:
                if gone := [node for node in nodes if node.evicted and node.call is not None]:
                    self.rebuilder.make_again(gone)
                self._keep(action.operator, action.which)
                continue
            for node in nodes:
                if node.resident and node.call is not None and not node.pinned and not node.locks:
                    self.memory.evict_planned(node)

    def after(self, operator: int) -> None:
        """After the operator has run: hold those of its results in ``made`` that the guide keeps."""
        self._keep(operator, range(len(self.made[operator])))

    def end(self) -> None:
        """Stop following: evict results kept only for the plan, and stop holding those that the program holds."""
        for node in self._kept:
            if node.kept is not None and node.handle is None and not node.locks and node.resident:
                self.memory.evict(node)
            node.kept = None if node.handle is not None else node.kept
        self._kept.clear()
        self.memory.release_dead()

    def _keep(self, operator: int, which: Sequence[int]) -> None:
        results = self.made[operator]
        for place in which:
            if (operator, place) in self.guide.kept and place < len(results):
                node = results[place]
                if node.call is not None and node.resident and node.kept is None:
                    node.kept = node.held_storage()
                    self._kept.append(node)

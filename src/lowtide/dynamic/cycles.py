"""Cycles: the operators that a program runs from the end of one backward pass to the end of the next.

A watched cycle becomes a graph like that of a captured program: operators in the program's order, the storages that they
make, and how long each must stay. A schedule keeps that order, so that it can be followed while the program runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from lowtide.dynamic.node import Node
from lowtide.ir import Costs, Graph, Op, Phase

MOST_OPERATORS = 1 << 13  # in a cycle; longer ones are not planned

Key = tuple[Any, ...]  # an operator and the bytes of its inputs; cycles are told apart by these


class Performed(NamedTuple):
    """An operator of a cycle. ``makes``: its recomputable results; ``constants``: its other results.

    ``peak_bytes``: peak above the level at its start, as if nothing had been evicted meanwhile.
    """

    name: str
    reads: tuple[Node, ...]
    makes: tuple[Node, ...]
    constants: tuple[Node, ...]
    cost_ns: int
    peak_bytes: int

    def made(self) -> tuple[Node, ...]:
        return (*self.makes, *self.constants)

    def is_version(self, node: Node) -> bool:
        """Whether the node is a storage that the operator wrote into, so that nothing new was allocated for it."""
        return any(node.number == read.number for read in self.reads)


@dataclass(slots=True, eq=False)
class Cycle:
    """A cycle as recorded so far: the ``keys`` of all operators and, if it is ``watched``, what they ``performed``.

    ``made``: storages made in the cycle. ``given``: evictable ones from before that were read, with their bytes. ``released``:
    those of both that the program released, with the number of operators until then. ``other_bytes``: before each operator,
    the level without evictable bytes and without ``constant_bytes``, the current bytes of constants made in the cycle.
    """

    watched: bool
    keys: list[Key] = field(default_factory=list)
    performed: list[Performed] = field(default_factory=list)
    made: set[Node] = field(default_factory=set)
    given: dict[Node, int] = field(default_factory=dict)
    released: dict[Node, int] = field(default_factory=dict)
    other_bytes: list[int] = field(default_factory=list)
    constant_bytes: int = 0
    cut: bool = False  # too long to be planned
    _name: int | None = None

    @property
    def name(self) -> int:
        """Hash of the keys, equal for equal cycles. Read it only after the cycle has ended."""
        if self._name is None:
            self._name = hash(tuple(self.keys))
        return self._name

    def give_up(self) -> None:
        """Stop recording: the cycle is too long to be planned."""
        self.cut, self.watched = True, False
        for part in (self.keys, self.performed, self.made, self.given, self.released, self.other_bytes):
            part.clear()

    def add(self, one: Performed) -> None:
        self.performed.append(one)
        for node in one.reads:
            if node not in self.made and node.bytes:
                self.given[node] = node.bytes
        self.made.update(one.makes, one.constants)
        self.constant_bytes += sum([node.size_bytes for node in one.constants])

    def release(self, node: Node) -> None:
        if node in self.made or node in self.given:
            self.released[node] = len(self.keys)
            self.constant_bytes -= 0 if node.bytes else node.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class CycleGraph:
    """A cycle as planners see it. ``operators``: for each op of the graph, the number of the program's operator, ``None`` for
    an op that only makes or holds storages; ``results``: for each recomputable storage, its operator's number and its index
    among that one's results; ``released``: after how many operators the program releases each storage."""

    graph: Graph
    costs: Costs
    operators: tuple[int | None, ...]
    results: tuple[tuple[int, int] | None, ...]
    released: tuple[int | None, ...]


def graph_of(cycle: Cycle) -> CycleGraph:
    """Build the graph of a watched cycle that has ended."""
    return _Builder(cycle).build()


class _Builder:
    """Builds the graph. Ops without results read non-recomputable storages at their release, to hold them until then."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.ops: list[Op] = []
        self.times: list[int] = []
        self.workspaces: list[int] = []
        self.operators: list[int | None] = []
        self.sizes: list[int] = []
        self.producers: list[int] = []
        self.results: list[tuple[int, int] | None] = []
        self.released: list[int | None] = []
        self.value: dict[Node, int] = {}
        self.current: dict[int, int] = {}  # the latest version of a storage, by its number
        self.fixed_bytes = 0

    def build(self) -> CycleGraph:
        cycle = self.cycle
        gone: dict[int, list[int]] = {}
        self._give(gone)
        released: dict[int, list[Node]] = {}
        for node, place in cycle.released.items():
            released.setdefault(place, []).append(node)
        for index, one in enumerate(cycle.performed):
            held = [self.value[node] for node in released.get(index, ()) if node in self.value]
            self._hold([*gone.get(index, ()), *(value for value in held if self.results[value] is None)])
            self._perform(index, one)
        last = [value for node, value in self.value.items() if self._stays(node, value)]
        self._keep_needed(last)
        graph = Graph.of_results("cycle", self.ops, self.producers, last, fixed_bytes=self.fixed_bytes)
        costs = Costs(np.array(self.times), np.array(self.workspaces), np.array(self.sizes))
        return CycleGraph(graph, costs, tuple(self.operators), tuple(self.results), tuple(self.released))

    def _give(self, gone: dict[int, list[int]]) -> None:
        """Add the storages present at the start: those computed before, and untracked memory released during the cycle, as
        inferred from the level."""
        cycle = self.cycle
        given = [self._store(size_bytes, None, node) for node, size_bytes in cycle.given.items()]
        most = np.maximum.accumulate(np.array(cycle.other_bytes[::-1], dtype=np.int64))[::-1]  # from each operator on
        self.fixed_bytes = int(most[-1]) - cycle.other_bytes[0]
        for index in np.flatnonzero(np.diff(most)).tolist():
            given.append(self._store(int(most[index] - most[index + 1]), None))
            gone.setdefault(index + 1, []).append(given[-1])
        self._add("given", None, (), given)

    def _perform(self, index: int, one: Performed) -> None:
        reads = [self.value[node] for node in one.reads if node in self.value]
        over: list[int] = []
        outputs = []
        for place, node in enumerate(one.made()):
            version = one.is_version(node)
            if version and node.number not in self.current:
                continue
            if place >= len(one.makes) > 0:
                self.fixed_bytes += 0 if version else node.size_bytes
                continue
            if version:
                over.append(self.current[node.number])
                self.released[over[-1]] = index + 1
            outputs.append(self._store(node.size_bytes, (index, place) if place < len(one.makes) else None, node))
        overwritten = [value for value in over if len(outputs) == 1 and self.sizes[value] == self.sizes[outputs[0]]]
        workspace_bytes = max(0, one.peak_bytes - sum(n.size_bytes for n in one.made() if not one.is_version(n)))
        again = any(self.results[value] for value in outputs)
        self._add(one.name, index, reads, outputs, not again, overwritten, max(one.cost_ns, 1), workspace_bytes)

    def _hold(self, values: Sequence[int]) -> None:
        if values:
            self._add("release", None, values, [])

    def _store(self, size_bytes: int, result: tuple[int, int] | None, node: Node | None = None) -> int:
        """Add a storage, produced by the op that is added next."""
        value = len(self.sizes)
        if node is not None:
            self.value[node] = self.current[node.number] = value
        self.sizes.append(size_bytes)
        self.producers.append(len(self.ops))
        self.results.append(result)
        self.released.append(None if node is None else self.cycle.released.get(node))
        return value

    def _add(
        self,
        name: str,
        operator: int | None,
        reads: Sequence[int],
        outputs: Sequence[int],
        effect: bool = True,
        overwrites: Sequence[int] = (),
        time_ns: int = 0,
        workspace_bytes: int = 0,
    ) -> None:
        number, forward = len(self.ops), Phase.FORWARD
        op = Op(number, name, name, tuple(reads), tuple(outputs), forward, effect=effect, overwrites=tuple(overwrites))
        self.ops.append(op)
        self.times.append(time_ns)
        self.workspaces.append(workspace_bytes)
        self.operators.append(operator)

    def _stays(self, node: Node, value: int) -> bool:
        """Whether the program still holds the storage at the end of the cycle."""
        return node not in self.cycle.released and self.current[node.number] == value

    def _keep_needed(self, last: Iterable[int]) -> None:
        """Mark ops whose results nobody reads as effects, since the program runs every operator."""
        needed = {self.producers[value] for value in last}
        for op in reversed(self.ops):
            needed.update(self.producers[value] for value in op.inputs)
            if op.id not in needed:
                self.ops[op.id] = replace(op, effect=True)

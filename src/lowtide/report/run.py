"""One training step as it will run: which operators when, and which bytes are there meanwhile. What every writer draws from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from lowtide.ir import Compute, Costs, Free, Graph, Op, SaveRng, Schedule, owned_storages


@dataclass(frozen=True, slots=True)
class Span:
    """An operator that runs. ``again``: it has run before. ``module`` and ``source`` are empty where not known."""

    name: str
    target: str
    start_ns: int
    time_ns: int
    forward: bool
    again: bool = False
    module: str = ""
    source: str = ""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.time_ns


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are there while the spans from ``first`` to ``last`` run, both included.

    ``last`` is the number of spans where they outlive the run.
    ``kind``: ``tensor``, ``workspace``, ``second copy``, ``generator state`` or ``fixed``. ``owner`` is the span that
    allocated it, ``None`` for what was there before; ``detail`` says what it is (type and shape).
    """

    kind: str
    bytes: int
    first: int
    last: int
    owner: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """``boundary``: the first span of the backward pass. ``blocks`` are in the order of their allocation."""

    spans: tuple[Span, ...]
    blocks: tuple[Block, ...]
    boundary: int

    @property
    def time_ns(self) -> int:
        return self.spans[-1].end_ns if self.spans else 0

    @property
    def boundary_ns(self) -> int:
        return self.spans[self.boundary].start_ns if self.boundary < len(self.spans) else self.time_ns

    def levels(self) -> list[int]:
        """Bytes that are there during each span."""
        changes = [0] * (len(self.spans) + 2)
        for block in self.blocks:
            changes[block.first] += block.bytes
            changes[block.last + 1] -= block.bytes
        return list(itertools.accumulate(changes))[:-2]

    def alive(self, index: int) -> list[Block]:
        """What is there during a span, the largest first."""
        there = [block for block in self.blocks if block.first <= index <= block.last and block.bytes]
        return sorted(there, key=lambda block: -block.bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self.levels(), default=0)

    @property
    def peak_index(self) -> int:
        """The first span at the peak."""
        levels = self.levels()
        return levels.index(max(levels)) if levels else 0


def run_of_schedule(graph: Graph, costs: Costs, schedule: Schedule) -> Run:
    """The run that a schedule describes; its levels are those of the simulator during each compute."""
    return _Follower(graph, costs, schedule).follow()


class _Follower:
    def __init__(self, graph: Graph, costs: Costs, schedule: Schedule) -> None:
        self.graph = graph
        self.costs = costs
        self.schedule = schedule
        self.owned = owned_storages(graph)
        self.spans: list[Span] = []
        self.blocks: dict[int, Block] = {}
        self.live: dict[int, int] = {}  # storage -> its block
        self.states: dict[int, int] = {}  # random op -> block of its generator state
        self.computed: set[int] = set()
        self.clock_ns = 0
        self.end = sum(isinstance(step, Compute) for step in schedule.steps)

    def follow(self) -> Run:
        if self.graph.fixed_bytes:
            self._allocate("fixed", self.graph.fixed_bytes, None, "resident throughout")
        last_compute = {step.op: i for i, step in enumerate(self.schedule.steps) if isinstance(step, Compute)}
        boundary: int | None = None
        for position, step in enumerate(self.schedule.steps):
            if position == self.schedule.boundary:
                boundary = len(self.spans)
            if isinstance(step, Compute):
                self._compute(self.graph.ops[step.op], forward=position < self.schedule.boundary)
                if last_compute[step.op] == position and step.op in self.states:
                    self._release(self.states.pop(step.op))
            elif isinstance(step, Free):
                self._release(self.live.pop(step.storage))
            elif isinstance(step, SaveRng):
                self.states[step.op] = self._allocate("generator state", self.costs.rng_state_bytes, len(self.spans))
        end = len(self.spans)
        return Run(tuple(self.spans), tuple(self.blocks.values()), end if boundary is None else boundary)

    def _compute(self, op: Op, *, forward: bool) -> None:
        index = len(self.spans)
        time_ns = int(self.costs.time_ns[op.id])
        again = op.id in self.computed
        self.spans.append(Span(op.name, op.target, self.clock_ns, time_ns, forward, again, op.module, op.source))
        self.computed.add(op.id)
        self.clock_ns += time_ns
        for storage in self.owned[op.id]:
            size = int(self.costs.storage_bytes[storage])
            if storage in self.live:
                self._release(self._allocate("second copy", size, index))
            else:
                self.live[storage] = self._allocate("tensor", size, index, self._detail(storage))
        workspace = int(self.costs.workspace_bytes[op.id])
        if workspace:
            self._release(self._allocate("workspace", workspace, index))

    def _allocate(self, kind: str, size: int, owner: int | None, detail: str = "") -> int:
        """A block that is there from the current span to the end, unless it is released."""
        first = owner or 0
        self.blocks[len(self.blocks)] = Block(kind, size, first, self.end, owner, detail)
        return len(self.blocks) - 1

    def _release(self, block: int) -> None:
        """After the current span."""
        held = self.blocks[block]
        self.blocks[block] = Block(held.kind, held.bytes, held.first, len(self.spans) - 1, held.owner, held.detail)

    def _detail(self, storage: int) -> str:
        value = self.graph.values[self.graph.storages[storage].values[0]]
        return f"{value.dtype} {'x'.join(map(str, value.shape))}".strip()

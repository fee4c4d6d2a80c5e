"""Simulate a schedule: the reference semantics of allocations, memory and time step by step, in exact integers.

- ``Compute(op)`` allocates every storage whose base is the op. While it runs, all live storages, its new ones and its
  workspace are resident. Storages of the op that are still live stay as they are; their second copy lives during the
  step only.
- ``Compute(op, into)`` allocates nothing: the storage ``into``, of the same size, becomes the op's.
- ``Free(storage)`` releases the storage after the step, or nothing if an op took it over (``into``).
- ``SaveRng(op)`` holds ``rng_state_bytes`` until after the last ``Compute`` of the op.
- ``Fetch(storage)`` allocates the storage at once, however long the copy takes.
- If collectives overlap with computation, the workspace of a collective stays until the first step before which the
  collective has certainly ended (``ir.transfers.awaited``).

Operators run one after another; ``ir.transfers`` computes how long they wait for transfers. Linear in the number of steps.
Validity is the checker's job.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Compute, Fetch, Free, SaveRng, Schedule
from lowtide.ir.transfers import Timing, awaited, timing


class Kind(enum.Enum):
    """The purpose of an allocation."""

    TENSOR = "tensor"
    SECOND_COPY = "second copy"
    WORKSPACE = "workspace"
    GENERATOR_STATE = "generator state"
    FIXED = "fixed"


class Allocation(NamedTuple):
    """Bytes that are resident during the steps from ``first`` to ``last``, both included. ``last`` is the number of
    steps if they outlive the schedule. ``storage`` is the storage of a tensor or second copy, ``None`` for other kinds."""

    kind: Kind
    bytes: int
    first: int
    last: int
    storage: int | None = None


_LAST = Allocation._fields.index("last")


@dataclass(frozen=True, eq=False)
class Simulation:
    """Memory and time of a schedule. ``timeline[i]``: bytes resident during step i, workspace included; ``peak_step``: the
    first step at the peak; ``made``: the fields of its allocations; ``clock`` computes the timing when asked."""

    peak_bytes: int
    peak_step: int
    timeline: npt.NDArray[np.int64]
    final_bytes: int
    made: Sequence[Sequence[Any]] = field(repr=False)
    clock: Callable[[], Timing] = field(repr=False)

    @functools.cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        """All allocations, in the order in which they are made; the timeline is their sum."""
        return tuple(Allocation._make(fields) for fields in self.made)

    @functools.cached_property
    def timing(self) -> Timing:
        """The times of steps and transfers. Byte counts do not depend on them."""
        return self.clock()

    @property
    def time_ns(self) -> int:
        """Time at which the last step and the last transfer have ended."""
        return self.timing.time_ns

    @property
    def live_at_peak(self) -> tuple[int, ...]:
        """Storages resident during ``peak_step``."""
        at_peak = (each for each in self.allocations if each.first <= self.peak_step <= each.last)
        return tuple(sorted(e.storage for e in at_peak if e.kind is Kind.TENSOR and e.storage is not None))


def simulate(graph: Graph, costs: Costs, schedule: Schedule) -> Simulation:
    """Simulate the memory of a valid ``schedule``, and its timing when that is read."""
    made = _allocations(graph, costs, schedule)
    *levels, final = resident_bytes(((first, last, size) for _, size, first, last, _ in made), len(schedule.steps))
    line = np.asarray(levels, dtype=np.int64)
    peak_step = int(line.argmax()) if levels else 0
    peak = max(max(levels, default=0), graph.fixed_bytes)
    return Simulation(peak, peak_step, line, final, made, functools.partial(timing, graph, costs, schedule))


def resident_bytes(lifetimes: Iterable[tuple[int, int, int]], steps: int) -> list[int]:
    """Return the bytes resident during each step and, as one more number, after the last. ``lifetimes``: (first step, last
    step, bytes) of each allocation, with ``last`` as in ``Allocation``."""
    changes = [0] * (steps + 2)
    for first, last, size in lifetimes:
        changes[first] += size
        changes[last + 1] -= size
    return list(itertools.accumulate(changes[:-1]))


def _allocations(graph: Graph, costs: Costs, schedule: Schedule) -> list[list[Any]]:
    """Return the fields of each ``Allocation``, as lists: few of the simulated schedules have their allocations read."""
    sizes, workspaces = costs.storage_bytes.tolist(), costs.workspace_bytes.tolist()
    owned = graph.owned
    last_compute = {step.op: i for i, step in enumerate(schedule.steps) if isinstance(step, Compute)}
    end = len(schedule.steps)
    ends = awaited(graph, schedule) if costs.collectives_beside else {}
    made: list[list[Any]] = []  # the fields of allocations
    live: dict[int, list[Any]] = {}  # storage -> its allocation
    states: dict[int, list[Any]] = {}  # op -> the allocation of its generator state

    def allocate(kind: Kind, size: int, first: int, last: int, storage: int | None = None) -> list[Any]:
        fields = [kind, size, first, last, storage]
        made.append(fields)
        return fields

    if graph.fixed_bytes:
        allocate(Kind.FIXED, graph.fixed_bytes, 0, end)
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            if step.into in live:
                live.pop(step.into)[_LAST] = index - 1
            for storage in owned[step.op]:
                if storage in live:
                    allocate(Kind.SECOND_COPY, sizes[storage], index, index, storage)
                else:
                    live[storage] = allocate(Kind.TENSOR, sizes[storage], index, end, storage)
            if workspaces[step.op]:
                allocate(Kind.WORKSPACE, workspaces[step.op], index, ends.get(index, index + 1) - 1)
            if step.op in states and last_compute[step.op] == index:
                states.pop(step.op)[_LAST] = index
        elif isinstance(step, Fetch):
            live[step.storage] = allocate(Kind.TENSOR, sizes[step.storage], index, end, step.storage)
        elif isinstance(step, Free):
            if step.storage in live:
                live.pop(step.storage)[_LAST] = index
        elif isinstance(step, SaveRng):
            states[step.op] = allocate(Kind.GENERATOR_STATE, costs.rng_state_bytes, index, end)
    return made

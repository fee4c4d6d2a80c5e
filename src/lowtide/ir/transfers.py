"""When the steps of a schedule run, and the transfers beside them, in exact nanoseconds.

Steps run in their order, each compute as long as it costs. A transfer begins with its step, but not before the one in the same
direction that was asked for before it has ended. Who needs what is still under way waits:

- a ``Free`` for either transfer of its storage, and a ``Compute`` that writes over it;
- a ``Compute`` that reads a storage, the caller who is handed it and the end, for a ``Fetch`` of it;
- a second transfer of a storage for the first.

The copy of a storage takes room in the second memory from its ``Offload`` to its last ``Fetch``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Compute, Fetch, Free, Offload, Schedule, Step


class Transfer(NamedTuple):
    """A storage on its way to the second memory (``Offload``) or back (``Fetch``), asked for by ``step``, under way from
    ``start_ns`` to ``end_ns``."""

    storage: int
    back: bool
    bytes: int
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """``start_ns[i]``: when step i begins, after whatever it waits for. ``wait_ns``: the part of ``time_ns`` in which nothing
    is computed. ``second_peak_bytes``: the most that the second memory holds."""

    time_ns: int
    start_ns: tuple[int, ...]
    wait_ns: int = 0
    transfers: tuple[Transfer, ...] = ()
    second_peak_bytes: int = 0

    @property
    def offloaded_bytes(self) -> int:
        """To the second memory, in all."""
        return sum(one.bytes for one in self.transfers if not one.back)

    @property
    def fetched_bytes(self) -> int:
        """Back from it, in all."""
        return sum(one.bytes for one in self.transfers if one.back)


def timing(graph: Graph, costs: Costs, schedule: Schedule) -> Timing:
    """``schedule`` on the clock, in time linear in the number of steps and of what they read. Raises ``PlanError`` for
    transfers where ``costs`` have no second memory."""
    if schedule.moves:
        return _Clock(graph, costs).run(schedule)
    times = costs.time_ns.tolist()
    starts = [0, *itertools.accumulate(times[step.op] if isinstance(step, Compute) else 0 for step in schedule.steps)]
    return Timing(starts[-1], tuple(starts[:-1]))


class _Clock:
    def __init__(self, graph: Graph, costs: Costs) -> None:
        if costs.second_memory is None:
            raise PlanError("the schedule moves storages, but its costs have no second memory.")
        self.graph = graph
        self.memory = costs.second_memory
        self.times: list[int] = costs.time_ns.tolist()
        self.sizes: list[int] = costs.storage_bytes.tolist()
        self.now = 0
        self.lanes = [0, 0]  # by direction: when its latest transfer ends
        self.leaving: dict[int, int] = {}  # storage -> when its copy is complete
        self.coming: dict[int, int] = {}  # storage -> when it is back
        self.transfers: list[Transfer] = []

    def run(self, schedule: Schedule) -> Timing:
        starts = []
        for index, step in enumerate(schedule.steps):
            if index == schedule.boundary:
                self._wait(self.coming, self._storages(self.graph.forward_outputs))
            self._before(step)
            starts.append(self.now)
            if isinstance(step, Compute):
                self.now += self.times[step.op]
            elif isinstance(step, (Offload, Fetch)):
                self._begin(index, step.storage, back=isinstance(step, Fetch))
        self.now = max(self.now, *self.lanes)
        computing = sum(self.times[step.op] for step in schedule.steps if isinstance(step, Compute))
        peak = _second_peak(schedule, self.sizes)
        return Timing(self.now, tuple(starts), self.now - computing, tuple(self.transfers), peak)

    def _before(self, step: Step) -> None:
        if isinstance(step, Compute):
            op = self.graph.ops[step.op]
            if self.coming:
                self._wait(self.coming, self._storages((*op.inputs, *op.outputs)))
            if step.into is not None:
                self._wait(self.leaving, (step.into,))
        elif isinstance(step, (Free, Offload, Fetch)):
            self._wait(self.coming, (step.storage,))
            self._wait(self.leaving, (step.storage,))

    def _wait(self, ends: dict[int, int], storages: Iterable[int]) -> None:
        for storage in storages:
            self.now = max(self.now, ends.pop(storage, 0))

    def _begin(self, index: int, storage: int, *, back: bool) -> None:
        size = self.sizes[storage]
        start = max(self.now, max(self.lanes) if self.memory.shared else self.lanes[back])
        end = start + (self.memory.fetch_ns(size) if back else self.memory.offload_ns(size))
        self.lanes[back] = end
        (self.coming if back else self.leaving)[storage] = end
        self.transfers.append(Transfer(storage, back, size, index, start, end))

    def _storages(self, values: Iterable[int]) -> list[int]:
        return [self.graph.values[value].storage for value in values]


def _second_peak(schedule: Schedule, sizes: list[int]) -> int:
    """The most bytes of copies at once."""
    last = {step.storage: index for index, step in enumerate(schedule.steps) if isinstance(step, Fetch)}
    held = peak = 0
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Offload):
            held += sizes[step.storage]
            peak = max(peak, held)
        elif isinstance(step, Fetch) and last[step.storage] == index:
            held -= sizes[step.storage]
    return peak

"""The clock of a schedule: when steps, transfers and collectives run, in exact nanoseconds.

Steps run in order; each compute takes its ``time_ns``. Three *lanes* run asynchronously beside them, each one item at a time:
offloads, fetches and, with ``Costs.collectives_beside``, collectives. An item on a lane begins at its step, but not before the
previous item on its lane has ended and the storages that it needs are ready. Computation continues at once, and waits only
where a step needs an item that has not ended:

- a step that reads a storage, the hand-over to the caller and the end wait for the item that makes it (``Fetch``, collective);
- a step that frees or writes a storage waits for the items that make or read it (``Offload``, collective).

An ``effect`` op may write into all that it reads; a view writes into nothing. The copy of a storage takes room in the second
memory from its ``Offload`` to its last ``Fetch``.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Compute, Fetch, Free, Offload, Schedule, Step


class Lane(enum.Enum):
    """A queue that runs asynchronously beside computation, one item at a time."""

    OFFLOAD = "offload"
    FETCH = "fetch"
    COLLECTIVE = "collective"


class Transfer(NamedTuple):
    """An item on a lane, from ``start_ns`` to ``end_ns``, issued by step ``step``. ``of`` is the storage that is offloaded or
    fetched, or the op that is a collective; ``bytes`` is the size of the storage, or of the collective's results."""

    lane: Lane
    of: int
    bytes: int
    step: int
    start_ns: int
    end_ns: int

    @property
    def time_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """The timing of a schedule. ``start_ns[i]``: when step i begins, after its waits, or, for a step that runs on a lane, when
    it is issued; in ascending order. ``wait_ns``: the part of ``time_ns`` in which nothing is computed; ``exposed_ns``: the
    part of ``wait_ns`` in which a collective runs. ``second_peak_bytes``: the most bytes in the second memory at once.
    ``lanes``: all items on lanes, in the order in which they were issued."""

    time_ns: int
    start_ns: tuple[int, ...]
    wait_ns: int = 0
    exposed_ns: int = 0
    lanes: tuple[Transfer, ...] = ()
    second_peak_bytes: int = 0

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The offloads and fetches."""
        return tuple(one for one in self.lanes if one.lane is not Lane.COLLECTIVE)

    @property
    def collectives(self) -> tuple[Transfer, ...]:
        """The collectives that overlap with computation."""
        return tuple(one for one in self.lanes if one.lane is Lane.COLLECTIVE)

    @property
    def collective_ns(self) -> int:
        """Total time of these collectives; all of it but ``exposed_ns`` is hidden behind computation."""
        return sum(one.time_ns for one in self.collectives)

    @property
    def offloaded_bytes(self) -> int:
        """Total bytes offloaded."""
        return sum(one.bytes for one in self.lanes if one.lane is Lane.OFFLOAD)

    @property
    def fetched_bytes(self) -> int:
        """Total bytes fetched."""
        return sum(one.bytes for one in self.lanes if one.lane is Lane.FETCH)


def timing(graph: Graph, costs: Costs, schedule: Schedule) -> Timing:
    """Compute the timing of ``schedule``, in time linear in the number of steps and the storages they read. Raises
    ``PlanError`` for transfers if ``costs`` has no second memory."""
    if schedule.moves or costs.collectives_beside:
        return Clock(graph, costs).run(schedule)
    times = costs.time_ns.tolist()
    starts = [0, *itertools.accumulate(times[step.op] if isinstance(step, Compute) else 0 for step in schedule.steps)]
    return Timing(starts[-1], tuple(starts[:-1]))


def needs(graph: Graph, step: Step) -> tuple[Sequence[int], Sequence[int]]:
    """Return the storages that a step reads, and those that it writes into or releases (see the module's docstring)."""
    if isinstance(step, Compute):
        written = graph.written[step.op]
        return graph.touched[step.op], written if step.into is None else (*written, step.into)
    if isinstance(step, Offload):
        return (step.storage,), ()
    return (), (step.storage,) if isinstance(step, (Free, Fetch)) else ()


class Clock:
    """Runs steps one after the other. ``asked``: when the latest step began or was issued; ``now``: the earliest time for the
    next; ``lanes``: when the latest item on each lane ends."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph = graph
        self.memory = costs.second_memory
        self.beside = costs.collectives_beside
        self.times: list[int] = costs.time_ns.tolist()
        self.sizes: list[int] = costs.storage_bytes.tolist()
        self.now = self.asked = 0
        self.lanes = dict.fromkeys(Lane, 0)
        self.read_until: dict[int, int] = {}  # storage -> when the last item on a lane that reads it ends
        self.made_at: dict[int, int] = {}  # storage -> when the item on a lane that makes it ends
        self.under_way: list[Transfer] = []
        self.computing: list[tuple[int, int]] = []  # intervals (start, end) in which operators run

    def run(self, schedule: Schedule) -> Timing:
        starts = []
        for index, step in enumerate(schedule.steps):
            if index == schedule.boundary:
                self.hand_over()
            self.take(step, index)
            starts.append(self.asked)
        self.now = max(self.now, *self.lanes.values())
        computing = sum(end - start for start, end in self.computing)
        exposed = _exposed([one for one in self.under_way if one.lane is Lane.COLLECTIVE], self.computing)
        peak = _second_peak(schedule, self.sizes)
        return Timing(self.now, tuple(starts), self.now - computing, exposed, tuple(self.under_way), peak)

    def hand_over(self) -> None:
        """Wait until the forward outputs are ready for the caller."""
        self._wait(self.ready(self.graph.storages_of(self.graph.forward_outputs), ()))

    def take(self, step: Step, index: int = 0) -> None:
        """Run ``step``, or issue it on its lane."""
        ready = self.ready(*needs(self.graph, step))
        communicates = isinstance(step, Compute) and self.beside and self.graph.ops[step.op].collective
        if not communicates and not isinstance(step, (Offload, Fetch)):
            self._wait(ready)
        self.asked = self.now
        if isinstance(step, (Offload, Fetch)):
            self._move(step, index, ready)
        elif isinstance(step, Compute) and communicates:
            self._communicate(step, index, ready)
        elif isinstance(step, Compute):
            self.now += self.times[step.op]
            since = self.computing.pop()[0] if self.computing and self.computing[-1][1] == self.asked else self.asked
            self.computing.append((since, self.now))
            self._forget(step.into)

    def ready(self, read: Iterable[int], written: Iterable[int]) -> int:
        """Return when all of ``read`` can be read and all of ``written`` can be written into or released."""
        made, until, ready = self.made_at, self.read_until, 0
        for storage in read:
            ready = max(ready, made[storage]) if storage in made else ready
        for storage in written:
            ready = max(ready, made.get(storage, 0), until.get(storage, 0))
        return ready

    def _wait(self, until: int) -> None:
        self.now = max(self.now, until)

    def _move(self, step: Offload | Fetch, index: int, ready: int) -> None:
        if self.memory is None:
            raise PlanError("the schedule moves storages, but its costs have no second memory.")
        size, back = self.sizes[step.storage], isinstance(step, Fetch)
        lane, other = (Lane.FETCH, Lane.OFFLOAD) if back else (Lane.OFFLOAD, Lane.FETCH)
        start = max(self.now, ready, self.lanes[lane], self.lanes[other] if self.memory.shared else 0)
        time_ns = self.memory.fetch_ns(size) if back else self.memory.offload_ns(size)
        ends = self.made_at if back else self.read_until
        ends[step.storage] = max(ends.get(step.storage, 0), start + time_ns)
        self._begin(lane, step.storage, size, index, start, time_ns)

    def _communicate(self, step: Compute, index: int, ready: int) -> None:
        start, op = max(self.now, ready, self.lanes[Lane.COLLECTIVE]), self.graph.ops[step.op]
        end = start + self.times[op.id]
        self._forget(step.into)
        read = (one for one in self.graph.read[op.id] if one != step.into)
        self.read_until.update((one, max(end, self.read_until.get(one, 0))) for one in read)
        self.made_at.update(dict.fromkeys(self.graph.changed[op.id], end))
        size = sum(self.sizes[storage] for storage in self.graph.made[op.id])
        self._begin(Lane.COLLECTIVE, op.id, size, index, start, self.times[op.id])

    def _begin(self, lane: Lane, of: int, size: int, index: int, start: int, time_ns: int) -> None:
        self.lanes[lane] = start + time_ns
        self.under_way.append(Transfer(lane, of, size, index, start, start + time_ns))

    def _forget(self, storage: int | None) -> None:
        """Forget the pending items of an overwritten storage: its ``Free`` releases nothing and need not wait."""
        if storage is not None:
            self.made_at.pop(storage, None)
            self.read_until.pop(storage, None)


def awaited(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """Map the step of each collective to the later step before which it has certainly ended if collectives overlap with
    computation, whatever the times are; the number of steps stands for the end."""
    steps = schedule.steps
    pending: list[int] = []  # the steps of collectives that may still run, in order
    reading: dict[int, int] = {}  # storage -> the step of the last collective that reads it
    making: dict[int, int] = {}
    found: dict[int, int] = {}
    for index, step in enumerate(steps):
        last = -1
        if index == schedule.boundary:
            last = max((making.get(one, -1) for one in graph.storages_of(graph.forward_outputs)), default=-1)
        if isinstance(step, Compute) and graph.ops[step.op].collective:
            if step.into is not None:
                reading.pop(step.into, None)
                making.pop(step.into, None)
            reading.update((one, index) for one in graph.read[step.op] if one != step.into)
            making.update(dict.fromkeys(graph.changed[step.op], index))
            pending.append(index)
        elif isinstance(step, (Compute, Free)):
            read, written = needs(graph, step)
            for one in (*read, *written):
                last = max(last, making[one]) if one in making else last
            for one in written:
                last = max(last, reading[one]) if one in reading else last
        while pending and pending[0] <= last:
            found[pending.pop(0)] = index
    return found | dict.fromkeys(pending, len(steps))


def _exposed(collectives: Iterable[Transfer], computing: Sequence[tuple[int, int]]) -> int:
    """Return the nanoseconds in which a collective runs and nothing is computed; both arguments are in order of time."""
    exposed = first = 0
    for one in collectives:
        exposed += one.time_ns
        while first < len(computing) and computing[first][1] <= one.start_ns:
            first += 1
        for start, end in itertools.islice(computing, first, None):
            if start >= one.end_ns:
                break
            exposed -= min(end, one.end_ns) - max(start, one.start_ns)
    return exposed


def _second_peak(schedule: Schedule, sizes: list[int]) -> int:
    """Return the most bytes of copies that the second memory holds at once."""
    last = {step.storage: index for index, step in enumerate(schedule.steps) if isinstance(step, Fetch)}
    held = peak = 0
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Offload):
            held += sizes[step.storage]
            peak = max(peak, held)
        elif isinstance(step, Fetch) and last[step.storage] == index:
            held -= sizes[step.storage]
    return peak

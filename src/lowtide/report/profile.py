"""One training step as it will run: which operators run when, and which bytes are in use. All writers use this."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.ir import Compute, Costs, Fetch, Graph, Kind, Lane, Schedule, resident_bytes, simulate

OFFLOAD, FETCH = "offload", "fetch"  # targets of spans that are moves


@dataclass(frozen=True, slots=True)
class Span:
    """An operator that runs, or the start of a fetch from the second memory, which takes no time itself. ``again``: it
    has run before. ``module`` and ``source`` are empty if not known."""

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
class MemoryBlock:
    """Bytes in use while the spans from ``first`` to ``last`` run, both included.

    ``last`` is the number of spans if they outlive the step. ``span`` is the one that allocated them, ``None`` if they
    were there before. ``detail``: their type and shape.
    """

    kind: Kind
    bytes: int
    first: int
    last: int
    span: Span | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """``boundary``: the first span of the backward pass. ``blocks`` are in order of allocation. ``time_ns``: when
    everything has ended. ``transfers``: moves beside the spans, in both directions. ``collectives``: those that
    overlap with computing; their spans mark where they are started, and take no time."""

    spans: tuple[Span, ...]
    blocks: tuple[MemoryBlock, ...]
    boundary: int
    time_ns: int
    transfers: tuple[Span, ...] = ()
    collectives: tuple[Span, ...] = ()

    @property
    def boundary_ns(self) -> int:
        return self.spans[self.boundary].start_ns if self.boundary < len(self.spans) else self.time_ns

    def levels(self) -> list[int]:
        """Bytes in use during each span."""
        return self._levels()[:-1]

    @property
    def at_peak(self) -> list[MemoryBlock]:
        """What is in use during the first span at the peak, largest first."""
        index = self.peak_index
        there = [block for block in self.blocks if block.first <= index <= block.last and block.bytes]
        return sorted(there, key=lambda block: -block.bytes)

    @property
    def final_bytes(self) -> int:
        """Bytes that outlive the step."""
        return self._levels()[-1]

    @property
    def peak_bytes(self) -> int:
        return max(self.levels(), default=0)

    @property
    def peak_index(self) -> int:
        """The first span at the peak."""
        levels = self.levels()
        return levels.index(max(levels)) if levels else 0

    def _levels(self) -> list[int]:
        return resident_bytes([(block.first, block.last, block.bytes) for block in self.blocks], len(self.spans))


def profile_of_schedule(graph: Graph, costs: Costs, schedule: Schedule) -> StepProfile:
    """The simulation of a valid ``schedule``, with its computes and fetches as spans."""
    run = simulate(graph, costs, schedule)
    spans: list[Span] = []
    before = [0]  # spans before each step; a generator state is saved just before its op runs
    computed: set[int] = set()
    for position, (step, start_ns) in enumerate(zip(schedule.steps, run.timing.start_ns, strict=True)):
        forward = position < schedule.boundary
        if isinstance(step, Compute):
            op, again = graph.ops[step.op], step.op in computed
            time_ns = 0 if op.collective and costs.collectives_beside else int(costs.time_ns[op.id])
            spans.append(Span(op.name, op.target, start_ns, time_ns, forward, again, op.module, op.source))
            computed.add(step.op)
        elif isinstance(step, Fetch):
            spans.append(_transfer(graph, step.storage, FETCH, start_ns, 0, forward))
        before.append(len(spans))
    transfers = []
    for one in run.timing.transfers:
        target = FETCH if one.lane is Lane.FETCH else OFFLOAD
        transfers.append(_transfer(graph, one.of, target, one.start_ns, one.time_ns, one.step < schedule.boundary))
    blocks = []
    for made in run.allocations:
        first, last = before[made.first], before[made.last + 1] - 1 if made.last < len(schedule.steps) else len(spans)
        span = None if made.kind is Kind.FIXED else spans[first]
        detail = "resident throughout" if span is None else ""
        if made.kind is Kind.TENSOR and made.storage is not None:
            value = graph.values[graph.storages[made.storage].values[0]]
            detail = f"{value.dtype} {'x'.join(map(str, value.shape))}".strip()
        blocks.append(MemoryBlock(made.kind, made.bytes, first, last, span, detail))
    collectives = tuple(
        replace(spans[before[one.step]], start_ns=one.start_ns, time_ns=one.time_ns) for one in run.timing.collectives
    )
    return StepProfile(
        tuple(spans), tuple(blocks), before[schedule.boundary], run.time_ns, tuple(transfers), collectives
    )


def _transfer(graph: Graph, storage: int, target: str, start_ns: int, time_ns: int, forward: bool) -> Span:
    """A move, named after the operator that allocated the storage."""
    base = graph.storages[storage].base
    assert base is not None, "an external storage does not move"
    op = graph.ops[base]
    return Span(f"{target} {op.name}", target, start_ns, time_ns, forward, False, op.module, op.source)

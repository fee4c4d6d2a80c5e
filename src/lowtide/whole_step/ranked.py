"""One rank of a model spread over a mesh: time and memory of its passes, also with every block checkpointed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.ir import Compute, Costs, Graph, Phase, Schedule, collectives_of, schedule_from_sequence, simulate
from lowtide.solve.beside import largest_result
from lowtide.solve.moving.early import improved
from lowtide.solve.moving.steps import place_transfers
from lowtide.units import format_bytes, format_time


@dataclass(frozen=True, slots=True)
class RankedPass:
    """A forward and backward pass of one rank. ``peak_bytes``: its peak. ``time_ns``: its duration. ``collective_ns``:
    the total time of its ``collectives`` (a count); ``exposed_ns`` of it is not hidden. ``forward_ns``: until the
    forward pass has ended."""

    peak_bytes: int
    time_ns: int
    computing_ns: int
    collective_ns: int
    collectives: int
    forward_ns: int

    @property
    def exposed_ns(self) -> int:
        """Time in which nothing is computed."""
        return self.time_ns - self.computing_ns

    @staticmethod
    def of(graph: Graph, costs: Costs, schedule: Schedule) -> RankedPass:
        run = simulate(graph, costs, schedule)
        together = collectives_of(graph, schedule)
        every = sum(int(costs.time_ns[step.op]) for step in schedule.steps if isinstance(step, Compute))
        collective = sum(int(costs.time_ns[op]) for op in together)
        forward = [*run.timing.start_ns, run.time_ns][schedule.boundary]
        return RankedPass(run.peak_bytes, run.time_ns, every - collective, collective, len(together), forward)

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.peak_bytes)}, {format_time(self.time_ns)}: computing {format_time(self.computing_ns)}, "
            f"{self.collectives} collectives {format_time(self.collective_ns)}, waited for {format_time(self.exposed_ns)}"
        )

    def to_json(self) -> Mapping[str, Any]:
        names = ("peak_bytes", "time_ns", "computing_ns", "collective_ns", "exposed_ns", "collectives", "forward_ns")
        return {name: getattr(self, name) for name in names}


def checkpointed(graph: Graph, costs: Costs, blocks: Sequence[str]) -> Schedule:
    """A schedule in which every block is gathered and run forward again before its backward pass. Collectives begin
    early as far as that takes no more memory than one more unit. ``blocks``: paths of their modules."""
    paths = [f"{name}." for name in blocks]
    block = [next((i for i, path in enumerate(paths) if f"{op.module}.".startswith(path)), -1) for op in graph.ops]
    forward: list[list[int]] = [[] for _ in blocks]
    for op in graph.ops:
        if op.phase is Phase.FORWARD and block[op.id] >= 0 and op.recomputable:
            forward[block[op.id]].append(op.id)
    sequence, again = [*range(graph.forward_ops)], set[int]()
    for op in graph.ops[graph.forward_ops :]:
        own = block[op.id]
        if own >= 0 and own not in again:
            again.add(own)
            sequence += forward[own]
        sequence.append(op.id)
    schedule = schedule_from_sequence(graph, sequence)
    if not costs.collectives_beside:
        return schedule
    room = simulate(graph, costs, schedule).peak_bytes + largest_result(graph, costs)
    return improved(graph, costs, place_transfers(graph, costs, schedule, room), room)

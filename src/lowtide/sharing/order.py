"""One order of collectives for all ranks of a model, whatever shapes each of them sees.

A collective waits for all of its ranks, so ranks with different orders would wait forever. Ranks with the same shapes
run one plan (``sharing.agreement``), but a plan for other shapes may order gathers differently. So the first plan of a
model settles an order, which is stored with its schedule in the store of the default process group. Every later plan
must keep to it, by that schedule if it fits, which needs no search. If not, a plan with another order is used only if
all ranks ask for one for the same program in the same call: then all change to it.

All ranks plan a model's first call. Each then reports whether its plan fits the budget, and hears from all others
before any begins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import distributed

from lowtide.errors import PlanError
from lowtide.ir import Graph, Schedule, collectives_of
from lowtide.ir.serial import schedule_from_json, schedule_to_json
from lowtide.program.distributed.communication import communicating
from lowtide.program.program import Program
from lowtide.sharing.agreement import default_store, program_key, tell, told
from lowtide.store import content_key

_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0  # to wait until the other ranks ask for the same program


class CollectiveOrder:
    """The order of a model on ``ranks``, which all know it by ``key``."""

    def __init__(self, key: str, ranks: Sequence[int]) -> None:
        self._key, self._ranks = f"lowtide/order/{key}", ranks
        self._begun = False
        self._generation = 0
        self._sequence: list[str] | None = None
        self._schedule: Schedule | None = None
        self._ops = ""

    def schedules(self, program: Program) -> tuple[Schedule, ...]:
        """The schedule with the settled order, if ``program`` has the same operators."""
        self._learn()
        same = self._schedule is not None and self._ops == _ops_key(program.graph)
        return (self._schedule,) if same and self._schedule is not None else ()

    def settles(self, program: Program, schedule: Schedule) -> bool:
        """Whether the schedule has the settled order. The first rank to ask settles it."""
        self._learn(sequence(program.graph, schedule), schedule, _ops_key(program.graph))
        return self._sequence == sequence(program.graph, schedule)

    def change(self, program: Program, schedule: Schedule) -> bool:
        """Settle the order of this schedule instead, if all ranks ask for a plan for this program. Returns whether they
        do."""
        store, name = default_store(), f"{self._key}/{self._generation + 1}/{program_key(program, ())}"
        store.add(name, 1)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while store.add(name, 0) < len(self._ranks):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        self._generation += 1
        self._sequence = None
        return self.settles(program, schedule)

    def begin(self, failure: str | None = None) -> None:
        """Report that this rank has its first plan, and wait for all ranks; or report its ``failure``. Raises
        ``PlanError`` if another rank failed."""
        if self._begun:
            return
        self._begun, store, own = True, default_store(), distributed.get_rank()
        tell(store, f"{self._key}/begun/{own}", failure)
        if failure is not None:
            return
        for rank in self._ranks:
            with communicating(f"exchange of first plans with rank {rank}"):
                reason = told(store, f"{self._key}/begun/{rank}")
            if reason is not None:
                raise PlanError(f"rank {rank} has no plan, so no rank can begin: {reason}")

    def _learn(self, found: list[str] | None = None, schedule: Schedule | None = None, ops: str = "") -> None:
        """Read the settled order, or settle that of the given schedule if there is none."""
        if self._sequence is not None:
            return
        store, name = default_store(), f"{self._key}/{self._generation}"
        if found is not None and schedule is not None and store.add(f"{name}/settled", 1) == 1:
            tell(store, f"{name}/order", (found, schedule_to_json(schedule), ops))
        elif found is None and not store.check([f"{name}/order"]):
            return
        found, own, self._ops = told(store, f"{name}/order")
        self._sequence, self._schedule = found, schedule_from_json(own)


def sequence(graph: Graph, schedule: Schedule) -> list[str]:
    """The collectives that a schedule runs, in order."""
    ops = (graph.ops[op] for op in collectives_of(graph, schedule))
    return [f"{op.target} {op.name}" for op in ops]


def _ops_key(graph: Graph) -> str:
    return content_key(repr([(op.target, op.inputs, op.outputs, op.phase.value, op.overwrites) for op in graph.ops]))

"""Plan one of several programs at once, in the memory that the others leave; its operators are measured within it
too."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from lowtide.cost.room import measured_in_bytes, measured_within
from lowtide.errors import InfeasibleBudgetError
from lowtide.pipeline import FIRST_PLANNER, make_program_plan, program_costs
from lowtide.planning import Plan
from lowtide.planning.make import plan_from
from lowtide.program import Program
from lowtide.runtime.programs.entry import Entry
from lowtide.runtime.programs.kin import operators
from lowtide.settings import Settings, searches
from lowtide.sharing import Member
from lowtide.sharing.assignment import as_alone

_MOST_PLANS = 64  # kept for reuse by other programs


class Room(NamedTuple):
    """What is left of ``total_bytes`` for program ``number`` of a step. ``beside_bytes``: bytes of the budget that no
    plan can free. ``must_fit``: whether an error is raised if no plan fits."""

    bytes: int
    total_bytes: int
    beside_bytes: int
    number: int
    must_fit: bool


class Spare:
    """Bytes of the budget that the current plans leave unused in a step. ``left_bytes`` computes them, only in steps
    that ask."""

    def __init__(self, left_bytes: Callable[[], int]) -> None:
        self._left_bytes = left_bytes
        self._bytes: int | None = None

    def begin_step(self) -> None:
        self._bytes = None

    @property
    def bytes(self) -> int:
        if self._bytes is None:
            self._bytes = self._left_bytes()
        return self._bytes

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._bytes is not None:
            self._bytes -= sum(tensor.nbytes for tensor in tensors)


class Measuring:
    """Measures the operators of several programs within what a step leaves; those that do not fit later, when nothing
    is held."""

    def __init__(self) -> None:
        self._waiting = weakref.WeakSet[Program]()

    def within(self, room_bytes: Callable[[Program], int]) -> contextlib.AbstractContextManager[None]:
        """A context in which operators of a program are measured within ``room_bytes(program)``."""

        def noted(program: Program) -> int:
            room = room_bytes(program)
            if any(measured_in_bytes(program, op.id) > room for op in program.graph.ops):
                self._waiting.add(program)
            return room

        return measured_within(noted)

    def made_up_for(self, members: Mapping[Entry, Member], room: int) -> dict[Entry, Member]:
        """Those ``members`` with operators not yet measured, measured now within ``room`` bytes."""
        found = [entry for entry in members if entry.program in self._waiting]
        self._waiting.clear()
        with measured_within(lambda _: room):
            return {entry: Member(entry.program, program_costs(entry.program)) for entry in found}


class FirstPlans:
    """Plans for programs when they are first met, each within the memory left then. ``settings``: those of the
    model."""

    def __init__(self, settings: Settings) -> None:
        quick = FIRST_PLANNER if searches(settings.planner) else settings.planner
        self._settings = dataclasses.replace(settings, reserve=0, planning="wait", planner=quick)
        self._found: OrderedDict[Any, Plan] = OrderedDict()  # for programs with the same operators and sizes

    def plan(self, member: Member, room: int, fraction: float) -> Plan:
        """A plan within ``room`` bytes. It saves about ``fraction`` of what the program would save without a plan, or
        more if that is not possible. A plan of another program with the same operators and sizes is reused. Raises
        ``InfeasibleBudgetError``."""
        graph, costs = member.program.graph, member.costs
        key = operators(member.program), costs.storage_bytes.tobytes(), fraction
        found = self._found.get(key)
        plan = None
        if found is not None and room <= found.budget_bytes:
            asked: dict[str, Any] = {"budget_bytes": room, "planner": found.planner, "seed": found.seed}
            plan = plan_from(graph, costs, [found.schedule], **asked)
            self._found.move_to_end(key)
        if plan is None:
            plan = self._planned(member, room, fraction)
            if not plan.schedule.moves:
                self._found[key] = plan
                if len(self._found) > _MOST_PLANS:
                    self._found.popitem(last=False)
        return plan

    def lowest(self, member: Member, error: InfeasibleBudgetError) -> Plan:
        """The plan that saves least, within about the minimum that ``error`` names."""
        return self._planned(member, error.minimum_bytes * 101 // 100, 0.0, error.plan)

    def _planned(self, member: Member, room: int, fraction: float, known: Plan | None = None) -> Plan:
        """``known``: a plan within ``room``."""
        between = max(room - member.limit_bytes(fraction) - member.arriving_bytes, 0) if fraction < 1 else 0
        if between:
            try:
                return self._within(member, room, between)
            except InfeasibleBudgetError as error:
                near = None if error.plan is None else as_alone(error.plan, member)  # saves slightly more than asked
            if near is not None and near.peak_bytes <= room:
                return dataclasses.replace(near, budget_bytes=room)
        return self._within(member, room, 0) if known is None else as_alone(known, member)

    def _within(self, member: Member, room: int, between: int) -> Plan:
        given = dataclasses.replace(self._settings, budget=room, total_budget=None, between_bytes=between)
        return as_alone(make_program_plan(member.program, given, costs=member.costs), member)

"""Pipeline stages of one rank within one budget: one stage with several calls at once, or several stages.

A rank runs the passes of its stages in the order of its schedule. While one pass runs, all micro-batches in flight hold
what they save, and parameters hold the gradients of earlier ones. Every micro-batch runs through every stage of a rank,
so the pipeline waits for the sum of their times, which ``sharing.choose`` minimizes. Each rank has its own memory and
cannot give any to another, so the slowest rank is as quick as possible if every rank is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import simulate
from lowtide.planning import Plan
from lowtide.program.distributed.gathers import unreduced_bytes
from lowtide.sharing.assignment import Planning, Share, plan_alone
from lowtide.sharing.choice import choose
from lowtide.sharing.constraints import Constraint, Footprint, Member, peak_bytes, rooms
from lowtide.units import format_bytes

Pass = tuple[int, bool]  # number of the stage on the rank, whether backward


def most_in_flight(order: Sequence[Pass]) -> dict[int, int]:
    """The most micro-batches of each stage that wait for their backward pass, including the running one."""
    waiting, most = Counter[int](), dict[int, int]()
    for stage, backward in order:
        waiting[stage] += -1 if backward else 1
        most[stage] = max(most.get(stage, 0), waiting[stage])
    return most


def stage_constraints(order: Sequence[Pass], left_bytes: Sequence[int]) -> list[Constraint]:
    """The constraints of the passes in this ``order``. ``left_bytes``: by stage, what a backward pass leaves in its
    parameters."""
    waiting, left = Counter[int](), set[int]()
    found: dict[Constraint, None] = {}
    for stage, backward in order:
        if backward:
            waiting[stage] -= 1
        saved = tuple(sorted(waiting.elements()))
        found[Constraint(sum(left_bytes[one] for one in left), stage, backward, saved)] = None
        if backward:
            left.add(stage)
        else:
            waiting[stage] += 1
    return list(found)


def left_bytes(member: Member) -> int:
    """Bytes of the gradients that a call leaves in parameters."""
    program, costs = member.program, member.costs
    values = program.graph.values
    storages = {values[value].storage for position, value in program.gradients if position < program.parameters}
    return sum(int(costs.storage_bytes[storage]) for storage in storages) + unreduced_bytes(program)


def stage_shares(
    members: Sequence[Member], constraints: Sequence[Constraint], taken: Sequence[Footprint], budget_bytes: int
) -> list[Share]:
    """The share of each stage: what it may take while it runs, and save. Plans within these shares are within the
    budget together. ``taken``: the footprints from which the shares follow."""
    left = rooms(constraints, [own.saved_bytes for own in taken], budget_bytes)
    return [
        Share(room, max(room - own.saved_bytes - member.arriving_bytes, 0))
        for room, own, member in zip(left, taken, members, strict=True)
    ]


class Calls:
    """``in_flight`` calls of a program at once, as micro-batches of a pipeline. While one runs, the others hold what
    they save. Parameters hold gradients of earlier calls if there are several calls, or if gradients were
    ``accumulated`` before."""

    def __init__(self, member: Member, in_flight: int, *, accumulated: bool = False) -> None:
        self.member, self.in_flight = member, in_flight
        left = left_bytes(member) if in_flight > 1 or accumulated else 0
        waiting = (0,) * (in_flight - 1)
        self._constraints = [Constraint(left, 0, backward, waiting) for backward in (False, True)]

    def peak_bytes(self, own: Footprint) -> int:
        """The peak if all calls have this footprint."""
        return peak_bytes(self._constraints, [own])

    def plan(self, budget_bytes: int, planning: Planning, quick: Planning) -> Plan:
        """A plan with which all calls fit the budget. The plan's own budget is what is left for the running call.
        ``quick`` makes the plans to compare. Raises ``InfeasibleBudgetError``."""
        try:
            (chosen,) = choose([self.member], self._constraints, budget_bytes, planning, quick)
            plan = plan_alone(chosen, self.member)
        except InfeasibleBudgetError:
            plan = self._planned_evenly(budget_bytes, quick)
        own = self.member.footprint(plan.schedule)
        waiting = self.peak_bytes(own) - own.running_bytes
        plan = dataclasses.replace(plan, budget_bytes=budget_bytes - waiting, lower_bound_ns=None)
        return plan.among(self.in_flight, waiting)

    def _planned_evenly(self, budget_bytes: int, quick: Planning) -> Plan:
        """A plan found with equal times for all operators. What fits does not depend on times, but what a search finds
        does, and the least budget of a program must also suffice for its versions with other gradients."""
        costs = self.member.costs
        even = Member(self.member.program, dataclasses.replace(costs, time_ns=np.ones_like(costs.time_ns)))
        try:
            (chosen,) = choose([even], self._constraints, budget_bytes, quick)
        except InfeasibleBudgetError as error:
            least = error.minimum_bytes
            raise InfeasibleBudgetError(
                f"no plan was found by which {self.in_flight} calls at once fit into {budget_bytes} bytes "
                f"({format_bytes(budget_bytes)}); about {least} bytes ({format_bytes(least)}) would do. Raise the budget, make "
                "the micro-batches smaller, or take a schedule that has fewer of them in flight.",
                minimum_bytes=least,
                budget_bytes=budget_bytes,
            ) from None
        plan = plan_alone(chosen, even)
        time_ns = simulate(plan.graph, costs, plan.schedule).time_ns
        return dataclasses.replace(plan, costs=costs, time_ns=time_ns)

"""Several calls of one program at once, as the micro-batches of a pipeline are: what a rank with one stage runs. While one
runs, others wait for their backward pass and hold what they save, and parameters hold the gradients that earlier ones left."""

from __future__ import annotations

import dataclasses

import numpy as np

from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import simulate
from lowtide.planning import Plan
from lowtide.sharing.assignment import Planning, plan_alone
from lowtide.sharing.choice import choose
from lowtide.sharing.constraints import Constraint, Footprint, Member, peak_bytes
from lowtide.sharing.stages import left_bytes
from lowtide.units import format_bytes


class Calls:
    """``in_flight`` calls of a program at once. Parameters hold gradients where there are several, or one was ``accumulated``
    before."""

    def __init__(self, member: Member, in_flight: int, *, accumulated: bool = False) -> None:
        self.member, self.in_flight = member, in_flight
        left = left_bytes(member) if in_flight > 1 or accumulated else 0
        waiting = (0,) * (in_flight - 1)
        self._constraints = [Constraint(left, 0, backward, waiting) for backward in (False, True)]

    def peak_bytes(self, own: Footprint) -> int:
        """With all of them run in this way."""
        return peak_bytes(self._constraints, [own])

    def plan(self, budget_bytes: int, planning: Planning, quick: Planning) -> Plan:
        """One by which the calls fit the budget; its own budget is what is left for the one that runs. ``quick`` makes those
        that are compared. Raises ``InfeasibleBudgetError``."""
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
        """What is found as if all operators took the same time: what fits does not depend on times, but what a search finds
        does, and the least budget of one program has to do for those of other gradients too."""
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

"""Several calls of one program at once, as the micro-batches of a pipeline are: while one runs, others wait for their backward
pass and hold what they save, and parameters hold the gradients that earlier ones left.

The more a call saves, the less it recomputes, and the less room is left for the one that runs. So plans are made quickly for
several limits of what may be saved, and the planner is asked for that of the quickest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Costs, simulate
from lowtide.planning import Plan
from lowtide.program.program import Program
from lowtide.sharing.assignment import Assignment, Planning, Share, plan_alone
from lowtide.sharing.constraints import Footprint, Member
from lowtide.sharing.stages import left_bytes
from lowtide.units import format_bytes

_TRIED = 8  # limits, evenly from the outputs alone to what is saved without a plan
_RAISES = 8  # of a budget that is too small, until one is met


def plan_in_flight(
    program: Program, costs: Costs, in_flight: int, budget_bytes: int, planning: Planning, quick: Planning
) -> Plan:
    """A plan by which ``in_flight`` calls fit the budget (``plan_calls``)."""
    return plan_calls(Calls(Member(program, costs), in_flight), budget_bytes, planning, quick)


def plan_calls(calls: Calls, budget_bytes: int, planning: Planning, quick: Planning) -> Plan:
    """A plan by which the ``calls`` fit the budget; its own budget is what is left for the one that runs. ``quick`` makes
    those that are compared. Raises ``InfeasibleBudgetError``."""
    found = calls.plan(budget_bytes, planning, quick)
    if found is not None:
        return found
    least = calls.evenly.least_budget(budget_bytes, quick)
    raise InfeasibleBudgetError(
        f"no plan was found by which {calls.in_flight} calls at once fit into {budget_bytes} bytes "
        f"({format_bytes(budget_bytes)}); about {least} bytes ({format_bytes(least)}) would do. Raise the budget, make the "
        "micro-batches smaller, or take a schedule that has fewer of them in flight.",
        minimum_bytes=least,
        budget_bytes=budget_bytes,
    )


def unconstrained_bytes(program: Program, costs: Costs, in_flight: int) -> int:
    """The peak of so many calls without rematerialization."""
    member = Member(program, costs)
    return Calls(member, in_flight).peak_bytes(member.keep_all)


class Calls:
    """``in_flight`` calls of a program at once: ``left_bytes`` are those of the gradients that a call leaves in parameters,
    where there are several, or one was ``accumulated`` before."""

    def __init__(self, member: Member, in_flight: int, *, accumulated: bool = False) -> None:
        self.member, self.in_flight, self.accumulated = member, in_flight, accumulated
        self.left_bytes = left_bytes(member) if in_flight > 1 or accumulated else 0
        self._known: dict[int, list[tuple[Assignment | None, int]]] = {}  # by budget, what was tried

    def peak_bytes(self, own: Footprint) -> int:
        """With all of them run in this way."""
        return self.left_bytes + (self.in_flight - 1) * own.saved_bytes + max(own.forward_bytes, own.backward_bytes)

    @functools.cached_property
    def evenly(self) -> Calls:
        """The same as if all operators took the same time: what fits does not depend on times, but what a search finds does,
        and the least budget of one program has to do for those of other gradients too."""
        costs = self.member.costs
        even = dataclasses.replace(costs, time_ns=np.ones_like(costs.time_ns))
        return Calls(Member(self.member.program, even), self.in_flight, accumulated=self.accumulated)

    def _timed(self, found: Assignment) -> Assignment:
        """What was found ``evenly``, with the times of this one."""
        assert found.plan is not None
        costs = dataclasses.replace(found.plan.costs, time_ns=self.member.costs.time_ns)
        time_ns = simulate(found.plan.graph, costs, found.plan.schedule).time_ns
        plan = dataclasses.replace(found.plan, costs=costs, time_ns=time_ns, lower_bound_ns=None)
        return dataclasses.replace(found, plan=plan)

    def plan(self, budget_bytes: int, planning: Planning, quick: Planning) -> Plan | None:
        """One within the budget, if one is found."""
        keep_all = Assignment(self.member.keep_all)
        if self.peak_bytes(keep_all.footprint) <= budget_bytes:
            return self._finished(keep_all, budget_bytes)
        found = self._found(budget_bytes, quick) or [
            self._timed(one) for one in self.evenly._found(budget_bytes, quick)
        ]
        found = sorted(found, key=lambda one: one.time_ns(self.member))
        for one in found:
            assert one.share is not None
            best, _ = self._assignment(one.share, budget_bytes, planning)
            if best is not None:
                return self._finished(min(best, found[0], key=lambda each: each.time_ns(self.member)), budget_bytes)
        return self._finished(found[0], budget_bytes) if found else None

    def least_budget(self, budget_bytes: int, quick: Planning) -> int:
        """The first budget from ``budget_bytes`` on that is found to be met."""
        for _ in range(_RAISES):
            tried = self._tried(budget_bytes, quick)
            if any(one is not None for one, _ in tried):
                break
            budget_bytes = max(
                budget_bytes + 1, min((missing for _, missing in tried), default=2 * budget_bytes) + budget_bytes
            )
        return budget_bytes

    def _found(self, budget_bytes: int, quick: Planning) -> list[Assignment]:
        return [one for one, _ in self._tried(budget_bytes, quick) if one is not None]

    def _tried(self, budget_bytes: int, quick: Planning) -> list[tuple[Assignment | None, int]]:
        if budget_bytes not in self._known:
            self._known[budget_bytes] = [*self._limited(budget_bytes, quick)]
        return self._known[budget_bytes]

    def _limited(self, budget_bytes: int, quick: Planning) -> Iterator[tuple[Assignment | None, int]]:
        """For each limit a quick plan, or ``None`` and by how much it missed the budget. One call alone has no limit."""
        if self.in_flight == 1:
            yield self._assignment(Share(max(budget_bytes - self.left_bytes, 1), 0), budget_bytes, quick)
            return
        for number in range(_TRIED):
            limit = self.member.limit_bytes(number / _TRIED)
            room = budget_bytes - self.left_bytes - (self.in_flight - 1) * limit
            if room <= limit:
                yield None, limit - room + 1
                continue
            between = max(room - limit - self.member.arriving_bytes, 0)
            yield self._assignment(Share(room, between), budget_bytes, quick)

    def _assignment(self, share: Share, budget_bytes: int, planning: Planning) -> tuple[Assignment | None, int]:
        try:
            plan = planning(self.member, share)
        except InfeasibleBudgetError as error:
            return None, error.minimum_bytes - share.budget_bytes
        found = Assignment(self.member.footprint(plan.schedule), share, plan)
        over = self.peak_bytes(found.footprint) - budget_bytes
        return (None, over) if over > 0 else (found, 0)

    def _finished(self, chosen: Assignment, budget_bytes: int) -> Plan:
        waiting = self.left_bytes + (self.in_flight - 1) * chosen.footprint.saved_bytes
        plan = plan_alone(chosen, self.member)
        plan = dataclasses.replace(plan, budget_bytes=budget_bytes - waiting, lower_bound_ns=None)
        return plan.among(self.in_flight, waiting)

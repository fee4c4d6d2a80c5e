"""How a program that shares a budget runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.ir import keep_all_schedule, plain_time_ns, simulate
from lowtide.planning import Plan, make_plan
from lowtide.sharing.constraints import Footprint, Member


@dataclass(frozen=True, slots=True)
class Share:
    """The limits for a program's planner: bytes that it may take while it runs, of which ``between_bytes`` must be free
    between its passes."""

    budget_bytes: int
    between_bytes: int


Planning = Callable[[Member, Share], Plan]  # raises InfeasibleBudgetError


@dataclass(frozen=True, slots=True)
class Assignment:
    """How a member runs, and its memory then: by ``plan``, made for ``share``, or without a plan, keeping
    everything."""

    footprint: Footprint
    share: Share | None = None
    plan: Plan | None = None

    def time_ns(self, member: Member) -> int:
        return plain_time_ns(member.program.graph, member.costs) if self.plan is None else self.plan.time_ns


def total_time_ns(chosen: Sequence[Assignment], members: Sequence[Member]) -> int:
    """The total time of all members in nanoseconds."""
    return sum(one.time_ns(member) for one, member in zip(chosen, members, strict=True))


def plan_alone(chosen: Assignment, member: Member) -> Plan:
    """The plan of an assignment, as a plan of the member's graph by itself."""
    graph, costs = member.program.graph, member.costs
    if chosen.plan is None:
        keep_all = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        return make_plan(graph, costs, budget=keep_all, planner="keep-all")
    return as_alone(chosen.plan, member)


def as_alone(plan: Plan, member: Member) -> Plan:
    """A plan that was made with room for others, as a plan of the program by itself."""
    graph, costs = member.program.graph, member.costs
    if plan.costs is costs:
        return plan
    costs = dataclasses.replace(costs, second_memory=plan.costs.second_memory)
    keep_all = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    peak = simulate(graph, costs, plan.schedule).peak_bytes
    return dataclasses.replace(
        plan, costs=costs, peak_bytes=peak, unconstrained_peak_bytes=keep_all, lower_bound_ns=None
    )


def saved_fraction(taken: Sequence[Footprint], members: Sequence[Member]) -> float:
    """Saved bytes beyond the outputs, as a fraction of those without plans."""
    saved = sum(one.saved_bytes - member.output_bytes for one, member in zip(taken, members, strict=True))
    most = sum(member.eager.saved_bytes - member.output_bytes for member in members)
    return min(max(saved / most, 0.0), 1.0) if most > 0 else 1.0

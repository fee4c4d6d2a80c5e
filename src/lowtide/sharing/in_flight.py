"""Several calls of one program at once, as the micro-batches of a pipeline are: while one runs, others wait for their backward
pass and hold what they save, and parameters hold the gradients that earlier ones left."""

from __future__ import annotations

import dataclasses

from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Costs
from lowtide.planning import Plan
from lowtide.program.program import Program
from lowtide.sharing.assignment import Planning, plan_alone
from lowtide.sharing.choice import choose
from lowtide.sharing.constraints import Constraint, Member, peak_bytes
from lowtide.units import format_bytes


def plan_in_flight(
    program: Program,
    costs: Costs,
    in_flight: int,
    budget_bytes: int,
    planning: Planning,
    quick: Planning | None,
) -> Plan:
    """A plan with which ``in_flight`` calls fit the budget: the more each saves, the less is left for the one that runs, which
    is the plan's own budget. ``planning`` and ``quick`` as of ``choose``.

    Raises ``InfeasibleBudgetError``."""
    member, constraints = Member(program, costs, outputs_held=True), _constraints(program, costs, in_flight)
    try:
        (chosen,) = choose([member], constraints, budget_bytes, planning, quick)
    except InfeasibleBudgetError as error:
        raise InfeasibleBudgetError(
            f"no plan was found by which {in_flight} calls at once fit into {budget_bytes} bytes "
            f"({format_bytes(budget_bytes)}); about {error.minimum_bytes} bytes ({format_bytes(error.minimum_bytes)}) would "
            "do. Raise the budget, make the micro-batches smaller, or take a schedule that has fewer of them in flight.",
            minimum_bytes=error.minimum_bytes,
            budget_bytes=budget_bytes,
        ) from None
    plan = plan_alone(chosen, member)
    waiting = (in_flight - 1) * member.footprint(plan.schedule).saved_bytes + _gradient_bytes(program, costs)
    return dataclasses.replace(
        plan, budget_bytes=budget_bytes - waiting, in_flight=in_flight, waiting_bytes=waiting, lower_bound_ns=None
    )


def unconstrained_bytes(program: Program, costs: Costs, in_flight: int) -> int:
    """The peak of so many calls without rematerialization."""
    member = Member(program, costs, outputs_held=True)
    return peak_bytes(_constraints(program, costs, in_flight), [member.keep_all])


def _constraints(program: Program, costs: Costs, in_flight: int) -> list[Constraint]:
    others, left = (0,) * (in_flight - 1), _gradient_bytes(program, costs) if in_flight > 1 else 0
    return [Constraint(left, 0, backward, others) for backward in (False, True)]


def _gradient_bytes(program: Program, costs: Costs) -> int:
    """Of the gradients that a call leaves in parameters."""
    graph = program.graph
    storages = {graph.values[value].storage for position, value in program.gradients if position < program.parameters}
    return sum(int(costs.storage_bytes[storage]) for storage in storages)

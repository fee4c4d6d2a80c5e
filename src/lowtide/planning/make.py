"""Make a plan: ask a planner for a schedule within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lowtide.budget import parse_budget
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Compute, Costs, Graph, Schedule, keep_all_schedule, simulate
from lowtide.place import solve_placed
from lowtide.planning.plan import Plan, storages_outside
from lowtide.solve import (
    Problem,
    Progress,
    Solution,
    Status,
    format_spec,
    get_planner,
    minimum_peak,
    schedules_above,
    solve,
)
from lowtide.solve.auto import Auto
from lowtide.units import format_bytes

Better = Callable[[int, Callable[[], Plan | None]], None]
"""Called with the time of an intermediate plan in ns, and a function that makes it (``None`` if over the budget)."""


def make_plan(
    graph: Graph,
    costs: Costs,
    *,
    budget: int | str,
    planner: str = "auto",
    seed: int = 0,
    placed: bool = False,
    on_progress: Progress | None = None,
    on_better: Better | None = None,
) -> Plan:
    """Plan ``graph`` within ``budget``. Raises ``InfeasibleBudgetError`` if the planner finds no schedule.

    ``placed``: the budget is for addresses, ``reserved_bytes``; if no plan meets it, the one that exceeds it least is
    returned. ``on_better`` receives plans found on the way, each quicker than those before.
    """
    unconstrained = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    budget_bytes = parse_budget(budget, unconstrained)

    def plan_of(solution: Solution) -> Plan | None:
        if solution.schedule is None:
            return None
        facts = {"lower_bound_ns": solution.lower_bound_ns, "solve_seconds": solution.solve_seconds}
        spec = format_spec(get_planner(planner))
        return Plan.of(graph, costs, solution.schedule, budget_bytes, spec, int(seed), **facts)

    def on_better_solution(time_ns: int, make: Callable[[], Solution]) -> None:
        if on_better is not None:
            on_better(time_ns, lambda: _fitting(plan_of(make()), placed))

    problem = Problem(graph, costs, budget_bytes, seed, on_progress, on_better_solution if on_better else None)
    apart = storages_outside(graph)
    solution = solve_placed(problem, planner, apart=apart).solution if placed else solve(problem, planner)
    plan = plan_of(solution)
    if plan is None:
        raise infeasible(problem, solution, unconstrained, planner)
    return plan


def _fitting(plan: Plan | None, placed: bool) -> Plan | None:
    """The plan, or ``None`` if its addresses must fit and do not."""
    return None if plan is None or (placed and not plan.is_placed) else plan


def plan_from(
    graph: Graph,
    costs: Costs,
    schedules: Iterable[Schedule],
    *,
    budget_bytes: int,
    planner: str,
    seed: int,
    placed: bool = False,
) -> Plan | None:
    """The quickest of ``schedules`` within the budget, as a plan. They were made for the same operators at other sizes.
    ``None`` if none fits, or, with ``placed``, if its addresses do not."""
    runs = ((simulate(graph, costs, schedule), schedule) for schedule in schedules)
    fitting = [(run.time_ns, schedule) for run, schedule in runs if run.peak_bytes <= budget_bytes]
    for _, schedule in sorted(fitting, key=lambda one: one[0]):
        plan = Plan.of(graph, costs, schedule, budget_bytes, planner, seed)
        if _fitting(plan, placed) is not None:
            return plan
    return None


def infeasible(problem: Problem, solution: Solution, unconstrained: int, planner: str) -> InfeasibleBudgetError:
    """The error for a budget that was not met: what is known to be reachable, and the bottleneck."""
    lowest, minimum = solution.lowest_schedule, solution.minimum_bytes
    if lowest is None:
        reached, lowest = minimum_peak(problem.graph, problem.costs, problem.seed)
        minimum = reached if minimum is None else minimum
    run = simulate(problem.graph, problem.costs, lowest)
    step = lowest.steps[run.peak_step]
    op = problem.graph.ops[step.op] if isinstance(step, Compute) else problem.graph.ops[0]
    place = (f" of {op.module}" if op.module else "") + (f" ({op.source})" if op.source else "")
    chosen = get_planner(planner)
    hint = "" if isinstance(chosen, Auto) else " Planner auto may reach less."
    percent = 100 * (minimum or 0) / max(unconstrained, 1)
    above = [(minimum or 0, lowest)]
    if isinstance(chosen, Auto):
        above = schedules_above(problem.graph, problem.costs, lowest, problem.seed)
    whole, *times = (
        simulate(problem.graph, problem.costs, schedule).time_ns
        for schedule in (keep_all_schedule(problem.graph), *(schedule for _, schedule in above))
    )
    overheads = tuple((least, time_ns / max(whole, 1) - 1) for (least, _), time_ns in zip(above, times, strict=True))
    return InfeasibleBudgetError(
        f"planner {planner} found no schedule within {problem.budget_bytes} bytes ({format_bytes(problem.budget_bytes)}); the "
        f"smallest budget it can meet is {minimum} bytes ({format_bytes(minimum or 0)}, {percent:.1f}% of the "
        f"{format_bytes(unconstrained)} without rematerialization){_cost_of(overheads)}. The bottleneck is {op.name}{place}."
        f"{hint} Raise the budget, or make the batch or the sequence smaller.{_percent_meant(problem, unconstrained)}",
        minimum_bytes=minimum or 0,
        operator=op.name,
        source=op.source,
        budget_bytes=problem.budget_bytes,
        overheads=overheads,
        proven=solution.status is Status.INFEASIBLE,
        plan=Plan.of(problem.graph, problem.costs, above[0][1], minimum or 0, planner, problem.seed),
    )


def _percent_meant(problem: Problem, unconstrained: int) -> str:
    """A hint, if the budget is so few bytes that percent were probably meant."""
    meant = problem.budget_bytes <= 100 < unconstrained // 100
    return f' For that part of the peak write "{problem.budget_bytes}%".' if meant else ""


def _cost_of(overheads: Sequence[tuple[int, float]]) -> str:
    """What the least budget costs, and what a larger one would save, as text."""
    (least, overhead), *larger = overheads
    texts = [f"at about {100 * overhead:.0f} % more time"]
    for budget, less in larger:
        more, percent = 100 * (budget / max(least, 1) - 1), f"{100 * less:.0f} %"
        if f"{100 * overhead:.0f} %" != percent:
            texts.append(f"with {more:.0f} % more, {budget} bytes ({format_bytes(budget)}), it is about {percent}")
    return ", " + "; ".join(texts)

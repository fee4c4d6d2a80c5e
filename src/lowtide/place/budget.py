"""Solve for a budget on addresses: find a schedule whose tensors get offsets within the budget, not only a byte count."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lowtide.notebook import Shown
from lowtide.place.schedule import Layout, lay_out
from lowtide.solve import Planner, Problem, Solution, Status, solve
from lowtide.units import format_time

ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class PlacedSolution(Shown):
    """A planner's ``solution`` and the addresses (``layout``) of its schedule, ``None`` without a schedule. ``counted`` is the
    solution of the same problem with the budget on counted bytes; the time by which it is quicker is the cost of placement."""

    solution: Solution
    layout: Layout | None
    counted: Solution

    def _heading(self) -> str:
        return self.solution._heading()

    def _facts(self) -> dict[str, str]:
        facts = self.solution._facts()
        if self.layout is not None:
            facts |= {"time, without addresses": format_time(self.counted.time_ns), **self.layout._facts()}
        return facts


def solve_placed(
    problem: Problem, planner: str | Planner = "auto", *, alignment: int | None = None, apart: Collection[int] = ()
) -> PlacedSolution:
    """Ask the planner for a schedule whose ``layout.reserved_bytes`` is within the budget.

    If the layout of a schedule exceeds the budget, ask again with a budget lower by the excess, up to ``ATTEMPTS`` schedules.
    If no layout fits, return the one that reserves the fewest bytes. The lower bound on the time is that for the budget on
    counted bytes, which holds for addresses too. ``alignment``, ``apart``: as in ``lay_out``. Raises what ``solve`` and
    ``lay_out`` raise."""
    counted = solve(problem, planner)
    found: list[PlacedSolution] = []
    solution = counted
    while solution.schedule is not None:
        layout = lay_out(
            problem.graph, problem.costs, solution.schedule, alignment=alignment, apart=apart, seed=problem.seed
        )
        found.append(PlacedSolution(_bounded_as(solution, counted), layout, counted))
        over = layout.reserved_bytes - problem.budget_bytes
        lower = solution.peak_bytes - over
        if over <= 0 or lower < 1 or len(found) == ATTEMPTS:
            break
        solution = solve(replace(problem, budget_bytes=lower, on_better=None), planner)
    if not found:
        return PlacedSolution(counted, None, counted)
    fitting = (one for one in found if _reserved(one) <= problem.budget_bytes)
    return next(fitting, min(found, key=_reserved))


def _reserved(found: PlacedSolution) -> int:
    return found.layout.reserved_bytes if found.layout is not None else 0


def _bounded_as(solution: Solution, counted: Solution) -> Solution:
    if solution is counted:
        return solution
    known = counted.lower_bound_ns
    status = Status.OPTIMAL if known is not None and solution.time_ns <= known else Status.FEASIBLE
    seconds = solution.solve_seconds + counted.solve_seconds
    return replace(solution, status=status, lower_bound_ns=known, solve_seconds=seconds)

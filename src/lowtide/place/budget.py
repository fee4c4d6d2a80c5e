"""A budget on addresses: a schedule whose tensors have offsets within it, not only a count of bytes."""

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
    """``solution`` is a planner's answer and ``layout`` its addresses, ``None`` where there is no schedule. ``counted`` is the
    answer to the same problem where the budget is on counted bytes: what it is quicker by is what the placement costs."""

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
    """The planner's answer, with ``layout.reserved_bytes`` within the budget where that is found.

    Where the addresses of a schedule take up more than the budget, the planner is asked again for a schedule that peaks lower
    by as much, until there are ``ATTEMPTS``; if none fits, the one that takes up least is the answer. A proven bound on the
    time is that of the budget on counted bytes, which holds for addresses too. ``alignment``, ``apart``: those of ``lay_out``.
    Raises what ``solve`` and ``lay_out`` raise."""
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

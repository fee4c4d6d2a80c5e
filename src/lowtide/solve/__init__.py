"""Planners: find a schedule for a graph, its costs and a budget. No planner is trusted: ``solve`` checks every answer."""

from __future__ import annotations

import time
from dataclasses import replace

from lowtide.errors import ScheduleError
from lowtide.ir import check, simulate
from lowtide.progress import Progress
from lowtide.solve.beside import runs_beside, solve_beside
from lowtide.solve.minimum import greedy_within, minimum_peak, peak_lower_bound, schedules_above, working_set_bound
from lowtide.solve.outcome import among_moving
from lowtide.solve.problem import Planner, Problem, Solution, Status, check_seed, each_quicker
from lowtide.solve.registry import format_spec, get_planner, planner_names, planner_summary

__all__ = [
    "Planner",
    "Problem",
    "Progress",
    "Solution",
    "Status",
    "check_seed",
    "format_spec",
    "get_planner",
    "greedy_within",
    "minimum_peak",
    "peak_lower_bound",
    "planner_names",
    "planner_summary",
    "schedules_above",
    "solve",
    "working_set_bound",
]


def solve(problem: Problem, planner: str | Planner = "auto") -> Solution:
    """Run the planner, then check and simulate its schedule. An infeasible budget is an answer, not an error.
    Raises ``ScheduleError`` if the planner returned an invalid schedule, one over the budget or the second memory's capacity,
    or wrong figures (a defect of the planner), and ``PlanError`` for an unknown planner."""
    chosen = get_planner(planner) if isinstance(planner, str) else planner
    began = time.perf_counter()
    if problem.on_better is not None:
        problem = replace(problem, on_better=each_quicker(problem.on_better))
    beside = runs_beside(problem)
    solution = solve_beside(problem, chosen) if beside else chosen.solve(problem)
    solution = replace(solution, solve_seconds=time.perf_counter() - began)
    if not beside and problem.costs.second_memory is not None and not getattr(chosen, "moves", False):
        solution = among_moving(problem, solution)
    if solution.schedule is None:
        return solution
    check(problem.graph, solution.schedule)
    result = simulate(problem.graph, problem.costs, solution.schedule)
    if result.peak_bytes > problem.budget_bytes:
        raise ScheduleError(
            f"planner {solution.planner} returned a schedule that peaks at {result.peak_bytes} bytes, "
            f"{result.peak_bytes - problem.budget_bytes} over the budget of {problem.budget_bytes}"
        )
    room = problem.costs.second_memory.capacity_bytes if problem.costs.second_memory else None
    if room is not None and result.timing.second_peak_bytes > room:
        raise ScheduleError(
            f"planner {solution.planner} returned a schedule that puts {result.timing.second_peak_bytes} bytes into a second "
            f"memory of {room}"
        )
    if (result.peak_bytes, result.time_ns) != (solution.peak_bytes, solution.time_ns):
        raise ScheduleError(
            f"planner {solution.planner} reports {solution.peak_bytes} bytes and {solution.time_ns} ns, "
            f"the simulator finds {result.peak_bytes} bytes and {result.time_ns} ns"
        )
    return solution

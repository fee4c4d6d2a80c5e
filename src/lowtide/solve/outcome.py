"""From candidate schedules to an answer: every one simulated in exact integers, the quickest that fits taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from lowtide.ir import Schedule, simulate
from lowtide.solve.problem import Problem, Solution, Status


def answer(
    planner: str, problem: Problem, candidates: Iterable[Schedule], began: float, *, found: Status = Status.FEASIBLE
) -> Solution:
    """The quickest candidate within the budget (then the lowest, then the earliest), with status ``found``.

    ``began`` is the reading of ``time.perf_counter`` at the start.
    """
    measured = [(simulate(problem.graph, problem.costs, schedule), schedule) for schedule in candidates]
    lowest = min(measured, key=lambda pair: pair[0].peak_bytes, default=None)
    minimum_bytes = None if lowest is None else lowest[0].peak_bytes
    fitting = [(result, schedule) for result, schedule in measured if result.peak_bytes <= problem.budget_bytes]
    if not fitting:
        return Solution(
            planner=planner,
            status=Status.UNSOLVED,
            schedule=None,
            peak_bytes=0,
            time_ns=0,
            minimum_bytes=minimum_bytes,
            lowest_schedule=None if lowest is None else lowest[1],
            solve_seconds=time.perf_counter() - began,
        )
    result, schedule = min(fitting, key=lambda pair: (pair[0].time_ns, pair[0].peak_bytes))
    return Solution(
        planner=planner,
        status=found,
        schedule=schedule,
        peak_bytes=result.peak_bytes,
        time_ns=result.time_ns,
        lower_bound_ns=result.time_ns if found is Status.OPTIMAL else None,
        minimum_bytes=minimum_bytes,
        solve_seconds=time.perf_counter() - began,
    )


def reachable(attempt: Callable[[int], Solution], budget_bytes: int) -> int:
    """The first budget, going up from peak to peak, that ``attempt`` meets when it is asked for just that.

    An attempt may come to no end at all; then the next budget is 2 % larger.
    """
    while True:
        solution = attempt(budget_bytes)
        if solution.status.solved:
            return budget_bytes
        budget_bytes = max(solution.minimum_bytes or 0, budget_bytes + budget_bytes // 50 + 1)

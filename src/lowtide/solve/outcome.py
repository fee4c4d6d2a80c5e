"""From candidate schedules to an answer: every one simulated in exact integers, the quickest that fits taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

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


def with_reachable_minimum(attempt: Callable[[int], Solution], unsolved: Solution, budget_bytes: int) -> Solution:
    """``unsolved``, the answer within ``budget_bytes``, naming the smallest budget that ``attempt`` meets.

    Found by bisection, to 2 % and at most to the byte. An attempt may come to no end at all; then the next budget is larger.
    """
    low, high = budget_bytes, unsolved.minimum_bytes or budget_bytes
    while not (met := attempt(high)).status.solved:
        low, high = high, max(met.minimum_bytes or 0, high + high // 50 + 1)
    while high - low > max(high // 50, 1):
        middle = (low + high) // 2
        found = attempt(middle)
        if found.status.solved:
            high, met = middle, found
        else:
            low = middle
    return replace(unsolved, minimum_bytes=high, lowest_schedule=met.schedule)

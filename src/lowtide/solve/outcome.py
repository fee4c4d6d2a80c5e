"""Make an answer of candidate schedules: simulate each in exact integers and take the quickest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from lowtide.ir import Schedule, keep_all_schedule, schedule_from_sequence, simulate
from lowtide.solve.model.compact import CompactGraph, Indices, compact, decode, encode_keep_all
from lowtide.solve.model.sweep import lowest, quickest, sweep
from lowtide.solve.problem import Problem, Solution, Status


def answer(
    planner: str, problem: Problem, candidates: Iterable[Schedule], *, found: Status = Status.FEASIBLE
) -> Solution:
    """Return the quickest candidate within the budget (of equals the lowest, then the first), with status ``found``. If none
    fits, ``UNSOLVED`` with the lowest."""
    measured = [(simulate(problem.graph, problem.costs, schedule), schedule) for schedule in candidates]
    lowest, lowest_schedule = min(measured, key=lambda pair: pair[0].peak_bytes)
    unsolved = Solution(planner, Status.UNSOLVED, None, 0, 0, minimum_bytes=lowest.peak_bytes)
    fitting = [(result, schedule) for result, schedule in measured if result.peak_bytes <= problem.budget_bytes]
    if not fitting:
        return replace(unsolved, lowest_schedule=lowest_schedule)
    result, schedule = min(fitting, key=lambda pair: (pair[0].time_ns, pair[0].peak_bytes))
    return replace(
        unsolved,
        status=found,
        schedule=schedule,
        peak_bytes=result.peak_bytes,
        time_ns=result.time_ns,
        lower_bound_ns=result.time_ns if found is Status.OPTIMAL else None,
    )


def keeping_all(planner: str, problem: Problem) -> Solution:
    """Answer with the program without recomputation, which is optimal if it fits."""
    return answer(planner, problem, [keep_all_schedule(problem.graph)], found=Status.OPTIMAL)


def bounded_by(solution: Solution, bound_ns: int) -> Solution:
    """Add a proven lower bound to a ``solution`` that is solved; it becomes ``OPTIMAL`` if it meets the bound."""
    status = Status.OPTIMAL if solution.time_ns <= bound_ns else Status.FEASIBLE
    return replace(solution, status=status, lower_bound_ns=min(bound_ns, solution.time_ns))


def least_time_ns(problem: Problem) -> int:
    """Return a lower bound, in ns, on the time of every schedule, whatever the budget: the time to compute every needed op
    once, or the time of the collectives if they overlap with computation and take longer."""
    run = simulate(problem.graph, problem.costs, keep_all_schedule(problem.graph))
    timing = run.timing
    return max(timing.time_ns - timing.wait_ns, timing.collective_ns)


def quickest_fitting(
    planner: str, problem: Problem, sequences: Callable[[CompactGraph], Iterable[Indices]], simulated: int
) -> Solution:
    """Return the quickest encoded sequence that fits, the program without recomputation included. Simulates the ``simulated``
    quickest that fit by the compact model, and the lowest. The sequences must not depend on the budget. If none fits,
    ``minimum_bytes`` is the lowest peak among them."""
    model = compact(problem.graph, problem.costs)
    found = [sweep(model, codes) for codes in (encode_keep_all(model), *sequences(model))]
    fitting = (one for one in found if one.peak_bytes <= problem.budget_bytes - model.fixed_bytes)
    chosen = [lowest(found), *quickest(fitting, simulated)]
    distinct = {id(one): one.codes for one in chosen}.values()
    return answer(planner, problem, [schedule_from_sequence(problem.graph, decode(model, codes)) for codes in distinct])


def among_moving(problem: Problem, solution: Solution) -> Solution:
    """Weaken the answer of a planner that moves nothing to a problem with a second memory: drop its proofs, which do not hold
    for schedules with transfers."""
    if solution.status.solved:
        return bounded_by(solution, least_time_ns(problem))
    return replace(solution, status=Status.UNSOLVED, lower_bound_ns=None)


def within_second_memory(problem: Problem, schedules: Iterable[Schedule]) -> list[Schedule]:
    """Return the schedules whose copies fit the capacity of the second memory."""
    memory = problem.costs.second_memory
    room = None if memory is None else memory.capacity_bytes
    if room is None:
        return list(schedules)
    runs = ((simulate(problem.graph, problem.costs, one), one) for one in schedules)
    return [schedule for run, schedule in runs if run.timing.second_peak_bytes <= room]


Sequences = Callable[[CompactGraph, int], Iterable[Indices]]


def quickest_eviction(planner: str, problem: Problem, sequences: Sequences, again: Sequences) -> Solution:
    """Return the quickest of the encoded ``sequences`` for the budget that fits, keeping everything included. If none fits,
    ``minimum_bytes`` is the smallest budget that the sequences of ``again`` meet, found by bisection to 2 %, at best to the
    byte. An attempt may yield no sequence at all; then a larger budget is tried."""
    model = compact(problem.graph, problem.costs)

    def attempt(budget_bytes: int, sequences: Sequences) -> Solution:
        evicting = (schedule_from_sequence(problem.graph, decode(model, c)) for c in sequences(model, budget_bytes))
        asked = replace(problem, budget_bytes=budget_bytes)
        return answer(planner, asked, [keep_all_schedule(problem.graph), *evicting])

    solution = attempt(problem.budget_bytes, sequences)
    if solution.status.solved:
        return solution
    low, high = problem.budget_bytes, solution.minimum_bytes or problem.budget_bytes
    while not (met := attempt(high, again)).status.solved:
        low, high = high, max(met.minimum_bytes or 0, high + high // 50 + 1)
    while high - low > max(high // 50, 1):
        middle = (low + high) // 2
        found = attempt(middle, again)
        if found.status.solved:
            high, met = middle, found
        else:
            low = middle
    return replace(solution, minimum_bytes=high, lowest_schedule=met.schedule)

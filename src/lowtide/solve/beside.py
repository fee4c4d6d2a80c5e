"""Solve problems in which collectives overlap with computation, with planners that only minimise a sum of times.

The planner is asked several times with collectives in line (run one after the other with the operators): at their full time,
at nearly no time, and with memory left for results that arrive early. Each answer's collectives are placed in the room that
the budget leaves (``lowtide.solve.moving.steps``) and moved one by one while the exact clock improves (``moving.early``); the
quickest schedule by that clock is the answer. The unmoved schedules compete too, so moving never makes the answer worse.
A heuristic: the planner does not know which collectives will be hidden.

Every schedule takes at least the sum of its operators' times and at least the sum of its collectives' times, so at least any
weighted mean of the two. The lower bound is the largest over a few weights, each proven on a graph with weighted times.
Bounds that planners prove in line do not hold, since a schedule that is slower in line may be quicker with overlap. A proof
that nothing fits does hold, unless collectives that may run early have workspaces, as these may then move elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lowtide.ir import Costs, Graph, Schedule, may_run_early, simulate
from lowtide.solve.bounds import prove_time
from lowtide.solve.model.compact import compact
from lowtide.solve.moving.bound import moving_bound
from lowtide.solve.moving.early import improved
from lowtide.solve.moving.steps import place_transfers
from lowtide.solve.outcome import answer, bounded_by, least_time_ns
from lowtide.solve.problem import Planner, Problem, Solution, Status

_HIDDEN = 0.02  # the price of a hidden collective, as a fraction of its time
_TRIES = ((1.0, 0), (_HIDDEN, 0), (1.0, 1))  # (price, room left, in multiples of the largest result of a collective)
_WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7)  # of collectives' time
_BOUND_EFFORT = 3
_RETRIES = 3  # with a smaller budget, if workspaces that stay longer exceed the real one


def runs_beside(problem: Problem) -> bool:
    """Whether the problem has collectives that overlap with computation."""
    return problem.costs.collectives_beside and any(op.collective for op in problem.graph.ops)


def in_line(graph: Graph, costs: Costs, price: float) -> Costs:
    """Return costs with which collectives run in line and take the fraction ``price`` of their time."""
    times = costs.time_ns.copy()
    chosen = [op.id for op in graph.ops if op.collective]
    times[chosen] = np.ceil(price * times[chosen]).astype(np.int64)
    return dataclasses.replace(costs, time_ns=times, collectives_beside=False)


def largest_result(graph: Graph, costs: Costs) -> int:
    """Return the most bytes that a collective allocates for its results."""
    owned = graph.owned
    made = (sum(int(costs.storage_bytes[one]) for one in owned[op.id]) for op in graph.ops if op.collective)
    return max(made, default=0)


def solve_beside(problem: Problem, planner: Planner) -> Solution:
    """Solve a problem in which collectives overlap with computation; see the module's docstring."""
    least = least_time_ns(problem)
    first: Solution | None = None
    best: Solution | None = None
    lowest = list[int]()
    tries = _tries(problem, planner)
    for solution in _answers(problem, planner, tries):
        first = first or solution
        found = [one for made in solution.schedules for one in _hidden(problem, made, one_by_one=len(tries) > 1)]
        if found:
            best = answer(first.planner, problem, [*([] if best is None else best.schedules), *found])
            lowest.append(best.minimum_bytes or 0)
        if first.schedule is None and first.status is Status.INFEASIBLE:
            break
        if best is not None and best.time_ns == least:
            break
    assert first is not None
    solution = first if best is None else dataclasses.replace(best, minimum_bytes=min(lowest))
    if not solution.status.solved:
        early = (op.id for op in problem.graph.ops if may_run_early(problem.graph, op))
        proven = first.status is Status.INFEASIBLE and not any(problem.costs.workspace_bytes[op] for op in early)
        status = Status.INFEASIBLE if proven else Status.UNSOLVED
        return dataclasses.replace(solution, status=status, lower_bound_ns=None)
    return bounded_by(solution, _bound(problem, getattr(planner, "effort", 0), solution.time_ns))


def _tries(problem: Problem, planner: Planner) -> Sequence[tuple[float, int]]:
    """Return the (price, room) pairs to try. If no collective may be recomputed, their price changes nothing, and for a first
    plan (effort 0) one try is enough."""
    if any(op.collective and op.recomputable for op in problem.graph.ops):
        return _TRIES
    once = [(price, results) for price, results in _TRIES if price == 1.0]
    return once if getattr(planner, "effort", 1) else once[:1]


def _answers(problem: Problem, planner: Planner, tries: Sequence[tuple[float, int]]) -> Iterator[Solution]:
    graph, costs, budget = problem.graph, problem.costs, problem.budget_bytes
    largest = largest_result(graph, costs)
    for price, results in tries:
        room = results * largest
        inner = dataclasses.replace(problem, costs=in_line(graph, costs, price), on_better=None)
        solution = planner.solve(dataclasses.replace(inner, budget_bytes=max(budget - room, 0)))
        for _ in range(_RETRIES):
            if solution.schedule is None:
                break
            over = simulate(graph, costs, solution.schedule).peak_bytes - budget
            if over <= 0:
                break
            yield dataclasses.replace(solution, schedule=None, lowest_schedule=solution.schedule)
            room += over
            solution = planner.solve(dataclasses.replace(inner, budget_bytes=max(budget - room, 0)))
        if room:  # what is proven with less memory proves nothing
            status = Status.UNSOLVED if solution.status is Status.INFEASIBLE else solution.status
            solution = dataclasses.replace(solution, status=status)
        yield solution


def _hidden(problem: Problem, schedule: Schedule, *, one_by_one: bool) -> list[Schedule]:
    """Return the schedule, and the versions of it with placed and moved collectives."""
    graph, costs, budget = problem.graph, problem.costs, problem.budget_bytes
    placed = place_transfers(graph, costs, schedule, budget)
    if not one_by_one:
        return [schedule, placed]
    better = improved(graph, costs, placed, budget)
    made = (schedule, placed, better, place_transfers(graph, costs, better, budget))
    return list({id(one): one for one in made}.values())


def _bound(problem: Problem, effort: int, known_ns: int) -> int:
    """Return a lower bound, in ns, on the time of every schedule within the budget."""
    found = least_time_ns(problem)
    if effort == 0:
        return found
    effort = min(effort, _BOUND_EFFORT)
    for weight in _WEIGHTS:
        if found >= known_ns:
            break
        found = max(found, _weighted_bound(problem, weight, effort, known_ns))
    return found


def _weighted_bound(problem: Problem, weight: float, effort: int, known_ns: int) -> int:
    graph, costs = problem.graph, problem.costs
    collective = np.array([op.collective for op in graph.ops])
    times = np.floor(np.where(collective, weight, 1 - weight) * costs.time_ns).astype(np.int64)
    weighted = dataclasses.replace(costs, time_ns=times, collectives_beside=False)
    if costs.second_memory is not None:
        return moving_bound(dataclasses.replace(problem, costs=weighted), effort, known_ns)
    model = compact(graph, weighted, floor=True)
    return prove_time(model, problem.budget_bytes, effort=effort, known_ns=known_ns).ns

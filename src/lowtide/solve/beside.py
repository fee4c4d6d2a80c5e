"""Collectives beside computing: planners minimise a sum of times, of which collectives are no part where they are hidden.

The planner is asked several times, with collectives in line, at full price and at next to nothing, and with room left for
what comes early. Each answer's collectives are placed in the room that the budget leaves (``lowtide.solve.moving.steps``)
and moved one by one as long as the exact clock says that it helps (``moving.early``); the quickest by that clock is the
answer. What is not moved competes too, so no answer is worse for it. A heuristic: the search does not know what hides where.

Every schedule takes as long as its operators and as long as its collectives, so at least any mean of the two: the lower
bound is the largest of those for a few weights, each proven for a graph with weighted times. What planners prove in line does
not hold: a schedule that takes longer in line may be quicker. That nothing fits does, but for the workspaces of collectives
that may run early, which are not bound to a place.
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

_HIDDEN = 0.02  # the price of a collective that is hidden
_TRIES = ((1.0, 0), (_HIDDEN, 0), (1.0, 1))  # prices; how many of the largest result of a collective room is left for
_WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7)  # of collectives' time
_BOUND_EFFORT = 3
_RETRIES = 3  # with less memory, where workspaces that stay longer exceed it


def runs_beside(problem: Problem) -> bool:
    """Whether a collective can be hidden."""
    return problem.costs.collectives_beside and any(op.collective for op in problem.graph.ops)


def in_line(graph: Graph, costs: Costs, price: float) -> Costs:
    """Costs by which collectives run in line, for this part of their time."""
    times = costs.time_ns.copy()
    chosen = [op.id for op in graph.ops if op.collective]
    times[chosen] = np.ceil(price * times[chosen]).astype(np.int64)
    return dataclasses.replace(costs, time_ns=times, collectives_beside=False)


def largest_result(graph: Graph, costs: Costs) -> int:
    """The most bytes that a collective makes."""
    owned = graph.owned
    made = (sum(int(costs.storage_bytes[one]) for one in owned[op.id]) for op in graph.ops if op.collective)
    return max(made, default=0)


def solve_beside(problem: Problem, planner: Planner) -> Solution:
    """The planner's answer to a problem in which collectives run beside computing."""
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
    """Where all collectives run once, their price changes nothing; then one try is enough for a first plan."""
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
    """The schedule, and what is made of it."""
    graph, costs, budget = problem.graph, problem.costs, problem.budget_bytes
    placed = place_transfers(graph, costs, schedule, budget)
    if not one_by_one:
        return [schedule, placed]
    better = improved(graph, costs, placed, budget)
    made = (schedule, placed, better, place_transfers(graph, costs, better, budget))
    return list({id(one): one for one in made}.values())


def _bound(problem: Problem, effort: int, known_ns: int) -> int:
    """Nanoseconds that no schedule within the budget undercuts."""
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

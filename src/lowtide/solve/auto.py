"""``auto``, the default: a portfolio of searches over compute sequences.

Solves the general problem: order-preserving schedules with recomputation anywhere, the forward pass included. Exact (a
shortest path over memory states) for graphs of up to about nine nodes and whenever recomputing nothing fits; a
heuristic without guarantee otherwise. Stages:

1. starting points: greedy eviction under several limits, nested segment checkpointing in several sizes;
2. hot simulated annealing from the program as written, several times (``lowtide.solve.anneal``);
3. warm annealing from the best starting point that fits; where none does, first a search for the lowest peak;
4. polishing of the best.

``effort`` (1 to 5) sets the number of iterations, fixed by the size of the graph, never by the clock: same problem,
same seed, same schedule. Below the smallest peak found the answer is ``UNSOLVED`` (``INFEASIBLE`` where exact) with
that peak as ``minimum_bytes``, which the same seed then reaches.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.errors import PlanError
from lowtide.solve.keep_all import KeepAll
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution, Status

if TYPE_CHECKING:
    from lowtide.solve.portfolio import Candidate, Portfolio

_EFFORT = {1: 0.15, 2: 0.4, 3: 1.0, 4: 3.0, 5: 10.0}
_HOT_RUNS = 3
_HOT_SHARE, _WARM_SHARE, _POLISH_SHARE = 0.22, 0.16, 0.18
_HOT, _WARM, _POLISH = 2.0, 0.2, 0.03  # first temperatures, in mean node times


@dataclass(frozen=True, slots=True)
class Auto:
    """``effort``: 1 (quick) to 5 (patient). ``exact``: solve graphs of a few nodes exactly."""

    effort: int = 3
    exact: bool = True

    def __post_init__(self) -> None:
        if self.effort not in _EFFORT:
            raise PlanError(
                f"auto: effort is {self.effort}, but goes from 1 to 5; write for instance 'auto{{effort=3}}'"
            )

    def solve(self, problem: Problem) -> Solution:
        began = time.perf_counter()
        kept = KeepAll().solve(problem)
        if kept.status is Status.OPTIMAL:
            return dataclasses.replace(kept, planner="auto")
        from lowtide.solve.portfolio import make_portfolio

        portfolio = make_portfolio(problem.graph, problem.costs, problem.seed)
        solution = _solve_exactly(problem, portfolio, began) if self.exact else None
        return solution or _search(problem, portfolio, _EFFORT[self.effort], began)


def _solve_exactly(problem: Problem, portfolio: Portfolio, began: float) -> Solution | None:
    """``None`` where the graph is too large, or the model's bytes are only a bound and nothing was found in it."""
    from lowtide.solve.exact import affordable, shortest
    from lowtide.solve.minimum import smallest_exactly

    model = portfolio.model
    optimum = shortest(model, problem.budget_bytes) if affordable(model) else None
    if optimum is None:
        return None
    if optimum.feasible:
        found = Status.OPTIMAL if model.faithful else Status.FEASIBLE
        return answer("auto", problem, [portfolio.schedule_of(optimum.nodes)], began, found=found)
    lowest = smallest_exactly(portfolio)
    if lowest is None:
        return None
    solution = answer("auto", problem, [lowest], began)
    unsolved = solution.status is Status.UNSOLVED and model.faithful
    return dataclasses.replace(solution, status=Status.INFEASIBLE) if unsolved else solution


def _search(problem: Problem, portfolio: Portfolio, effort: float, began: float) -> Solution:
    from lowtide.solve.minimum import lowest_candidate, starting_points

    iterations = int(effort * portfolio.iterations)
    budget = problem.budget_bytes
    problem.progress("starting points", 0.0)
    points = [*starting_points(portfolio), *portfolio.greedy(budget)]
    fitting = [point for point in points if point.peak_bytes <= budget]
    if not fitting:
        problem.progress("lowering the peak", 0.05)
        lowest = lowest_candidate(portfolio, budget)
        if lowest.peak_bytes > budget:
            return _unsolved(problem, answer("auto", problem, [portfolio.schedule(lowest)], began))
        fitting = [lowest]
    warm_share = _WARM_SHARE
    for run in range(_HOT_RUNS):
        problem.progress("annealing", 0.1 + _HOT_SHARE * run)
        found = portfolio.anneal(portfolio.keep_all(), budget, int(_HOT_SHARE * iterations), run, _HOT)
        if found is None:  # too small a budget to get there from scratch: what is left goes to the warm run
            warm_share += _HOT_SHARE * (_HOT_RUNS - 1 - run)
            break
        fitting.append(found)
    problem.progress("annealing from the best start", 1 - _POLISH_SHARE - warm_share)
    fitting.extend(_again(portfolio, fitting, budget, int(warm_share * iterations), 10, _WARM))
    problem.progress("polishing", 1 - _POLISH_SHARE)
    fitting.extend(_again(portfolio, fitting, budget, int(_POLISH_SHARE * iterations), 11, _POLISH))
    problem.progress("done", 1.0)
    return answer("auto", problem, [portfolio.schedule(point) for point in _quickest(fitting, 6)], began)


def _unsolved(problem: Problem, solution: Solution) -> Solution:
    """Proven infeasible where the working set of one op is above the budget."""
    from lowtide.solve.minimum import working_set_bound

    proven = working_set_bound(problem.graph, problem.costs) > problem.budget_bytes
    return (
        dataclasses.replace(solution, status=Status.INFEASIBLE) if proven and not solution.status.solved else solution
    )


def _again(
    portfolio: Portfolio, known: list[Candidate], budget: int, iterations: int, stream: int, hot: float
) -> list[Candidate]:
    """The quickest known, annealed once more."""
    found = portfolio.anneal(_quickest(known, 1)[0], budget, iterations, stream, hot)
    return [] if found is None else [found]


def _quickest(candidates: list[Candidate], count: int) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: (candidate.recompute_ns, candidate.peak_bytes))[:count]

"""``auto``, the default: a portfolio of searches over compute sequences.

Solves the general problem: order-preserving schedules with recomputation anywhere, the forward pass included. Exact (a
shortest path over memory states) for graphs of up to about nine nodes and whenever recomputing nothing fits; a
heuristic otherwise, with a lower bound that holds for every schedule (``lowtide.solve.bounds``). Stages:

1. starting points: greedy eviction under several limits, nested segment checkpointing in several sizes, the dynamic
   programs over blocks that ``rotor``, ``rockmate`` and ``h-rockmate`` are made of; where none fits, a search for the
   lowest peak;
2. the lower bound; whatever meets it is optimal and ends the search;
3. simulated annealing over compute sequences (``lowtide.solve.search.anneal``), hot from the program as written and warm from
   the best starting point, several runs each, two at a time;
4. more runs of the kind that did better; then of the best at low temperatures.

``effort`` (1 to 5) sets the number of iterations, fixed by the size of the graph, never by the clock: same problem,
same seed, same schedule. Below the smallest peak found the answer is ``UNSOLVED`` (``INFEASIBLE`` where proven) with
that peak as ``minimum_bytes``, which the same seed then reaches.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.errors import PlanError
from lowtide.solve.keep_all import KeepAll
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution, Status

if TYPE_CHECKING:
    from lowtide.solve.search.portfolio import Candidate, Portfolio

_EFFORT = {1: 0.04, 2: 0.25, 3: 1.0, 4: 3.0, 5: 10.0}  # factors of the iterations of a run
_LOWER_EFFORT = {1: 0.2, 2: 0.5, 3: 1.0, 4: 1.0, 5: 1.0}  # of the iterations of a search for the lowest peak
_BOUND_EFFORT = {1: 1, 2: 2, 3: 3, 4: 3, 5: 3}  # of the lower bound, in its own scale,
_BOUND_LIMITS = ((1400, 3),)  # and its largest at up to so many nodes; 1 above
# First temperatures of the rounds of runs, in mean node times. Hot runs pay only where many iterations fall to a node.
_HOT_NODES = 800
_HOT, _WARM = (2.0, 2.0), (1.0, 0.3)
_MORE_HOT, _MORE_WARM = (2.0, 2.0, 2.0, 2.0), (0.3, 0.3, 0.1, 0.1)
_POLISH = ((0.1, 0.05, 0.05, 0.03), (0.05, 0.05, 0.03, 0.03))
_LARGE = ((1.0, 0.3), (0.1, 0.05), (0.05, 0.03))


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
        from lowtide.solve.search.portfolio import make_portfolio

        portfolio = make_portfolio(problem.graph, problem.costs, problem.seed)
        solution = _solve_exactly(problem, portfolio, began) if self.exact else None
        return solution or _search(problem, portfolio, self.effort, began)


def _solve_exactly(problem: Problem, portfolio: Portfolio, began: float) -> Solution | None:
    """``None`` where the graph is too large, or the model's bytes are only a bound and nothing was found in it."""
    from lowtide.solve.minimum import smallest_exactly
    from lowtide.solve.search.exact import affordable, shortest

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


def _search(problem: Problem, portfolio: Portfolio, effort: int, began: float) -> Solution:
    budget = problem.budget_bytes
    points = _starts(problem, portfolio)
    fitting = [point for point in points if point.peak_bytes <= budget]
    if not fitting:
        lowest = _lowest(problem, portfolio, effort)
        if lowest.peak_bytes > budget:
            return _unsolved(problem, portfolio, answer("auto", problem, [portfolio.schedule(lowest)], began))
        fitting = [lowest]
    problem.progress("proving a bound", 0.05)
    bound_ns = _bound(problem, portfolio, fitting, effort)
    found = _anneal(problem, portfolio, fitting, int(_EFFORT[effort] * portfolio.iterations), bound_ns)
    problem.progress("done", 1.0)
    solution = answer("auto", problem, [portfolio.schedule(point) for point in _quickest(found, 6)], began)
    proven = portfolio.model.faithful and solution.time_ns <= bound_ns
    status = Status.OPTIMAL if proven else solution.status
    return dataclasses.replace(solution, status=status, lower_bound_ns=min(bound_ns, solution.time_ns))


def _bound(problem: Problem, portfolio: Portfolio, known: list[Candidate], effort: int) -> int:
    """Nanoseconds that no schedule within the budget undercuts."""
    from lowtide.solve.bounds import time_bound

    limit = next((limit for nodes, limit in _BOUND_LIMITS if portfolio.model.nodes <= nodes), 1)
    known_ns = portfolio.time_ns(_quickest(known, 1)[0])
    return time_bound(
        portfolio.model, problem.budget_bytes, effort=min(_BOUND_EFFORT[effort], limit), known_ns=known_ns
    )


def _starts(problem: Problem, portfolio: Portfolio) -> list[Candidate]:
    from lowtide.solve.minimum import starting_points

    problem.progress("starting points", 0.0)
    budget = problem.budget_bytes
    points = [*starting_points(portfolio), *portfolio.greedy(budget), *portfolio.blocks(budget)]
    if portfolio.model.nodes > _HOT_NODES and 0 < portfolio.model.boundary < portfolio.model.nodes:
        points += portfolio.tables_of_rockmate()  # what few moves per node cannot make up for
    return points


def _lowest(problem: Problem, portfolio: Portfolio, effort: int) -> Candidate:
    from lowtide.solve.minimum import lowest_candidate

    problem.progress("lowering the peak", 0.05)
    return lowest_candidate(portfolio, problem.budget_bytes, _LOWER_EFFORT[effort])


def _anneal(
    problem: Problem, portfolio: Portfolio, points: list[Candidate], iterations: int, bound_ns: int
) -> list[Candidate]:
    """``points`` and what the rounds of runs made of them."""
    from lowtide.solve.search.portfolio import Run

    found = points

    def go_on(stream: int, heats: Iterable[float], start: Candidate) -> list[Candidate]:
        if portfolio.time_ns(_quickest(found, 1)[0]) <= bound_ns:
            return []
        runs = [Run(start, number, heat) for number, heat in enumerate(heats, stream)]
        return portfolio.round(runs, problem.budget_bytes, iterations, bound_ns)

    large = portfolio.model.nodes > _HOT_NODES
    if not large:
        problem.progress("annealing", 0.1)
        from_hot = go_on(0, _HOT, portfolio.keep_all())
        found = [*found, *go_on(10, _WARM, _quickest(points, 1)[0])]
        hotter = _quickest([*found, *from_hot], 1)[0]
        restart = any(hotter is candidate for candidate in from_hot)
        found = [*found, *from_hot]
        problem.progress("annealing what did better", 0.4)
        more = go_on(20, _MORE_HOT, portfolio.keep_all()) if restart else go_on(30, _MORE_WARM, hotter)
        found = [*found, *more]
    rounds = _LARGE if large else _POLISH
    for turn, heats in enumerate(rounds):
        problem.progress("annealing from the best", (turn if large else turn + 2) / (len(rounds) + 2))
        found = [*found, *go_on(40 + 10 * turn, heats, _quickest(found, 1)[0])]
    return found


def _unsolved(problem: Problem, portfolio: Portfolio, solution: Solution) -> Solution:
    """Proven infeasible where what must be resident is above the budget."""
    from lowtide.solve.bounds import proven_infeasible
    from lowtide.solve.minimum import working_set_bound

    if solution.status.solved:
        return solution
    proven = working_set_bound(problem.graph, problem.costs) > problem.budget_bytes
    proven = proven or proven_infeasible(portfolio.model, problem.budget_bytes)
    return dataclasses.replace(solution, status=Status.INFEASIBLE) if proven else solution


def _quickest(candidates: list[Candidate], count: int) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: (candidate.recompute_ns, candidate.peak_bytes))[:count]

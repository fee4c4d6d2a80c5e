"""``auto``, the default: a portfolio of searches over compute sequences (``docs/planners/auto.md`` has its stages and why).

Finds order-preserving schedules with recomputation anywhere, the forward pass included. Exact (a shortest path over memory
states) for graphs of up to about twenty nodes, for most of up to sixty, and whenever the program without recomputation fits;
else a heuristic, with a lower bound that holds for every schedule. ``portfolio_search`` has the starting points, the bound,
annealing and recombination; ``moving.search`` runs the same searches for a second memory, on graphs in which fetching is an
operator.

``effort`` (1 to 5) sets the number of iterations, which depends on the size of the graph, never on the clock: same problem,
same seed, same schedule. Effort 0 returns the quickest starting point: a first plan at once. Every effort meets the same
budgets: below the smallest peak found the answer is ``UNSOLVED`` (``INFEASIBLE`` if proven) with that peak as
``minimum_bytes``, which the same seed then reaches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from lowtide.solve.bounds import prove_time
from lowtide.solve.minimum import outputs_in_the_way, smallest_exactly
from lowtide.solve.moving.bound import bounded
from lowtide.solve.moving.search import moving_schedule
from lowtide.solve.options import Options, between
from lowtide.solve.outcome import answer, bounded_by, least_time_ns
from lowtide.solve.portfolio_search import EFFORTS, search_sequences
from lowtide.solve.problem import Problem, Solution, Status
from lowtide.solve.search.memory_paths import Path, affordable, shortest
from lowtide.solve.search.portfolio import Portfolio, make_portfolio


@dataclass(frozen=True, slots=True)
class Auto(Options):
    """The default planner. ``effort``: 0 (starting points only), 1 (quick) to 5 (patient). ``exact``: solve small graphs
    exactly."""

    effort: int = between(3, min(EFFORTS), max(EFFORTS))
    exact: bool = True
    moves: ClassVar[bool] = True

    def search(self, problem: Problem) -> Solution:
        if problem.costs.second_memory is not None:
            return self._with_moves(problem)
        return self._recomputing(problem, make_portfolio(problem.graph, problem.costs, problem.seed))

    def _with_moves(self, problem: Problem) -> Solution:
        """Return the quicker of the best schedule with transfers and the best without."""
        portfolio = make_portfolio(problem.graph, problem.costs, problem.seed)
        alone: list[Solution] = []

        def still(beaten_ns: int | None = None) -> Solution:
            if not alone:
                alone.append(self._recomputing(problem, portfolio, beaten_ns))
            return alone[0]

        moving = moving_schedule(problem, self.effort, portfolio, lambda beaten_ns: still(beaten_ns).schedule)
        moved = None if moving is None else answer("auto", problem, [moving])
        solved, least = moved if moved is not None and moved.status.solved else None, least_time_ns(problem)
        if solved is not None and solved.time_ns == least:
            return dataclasses.replace(solved, status=Status.OPTIMAL, lower_bound_ns=least)
        other = still(None if solved is None else solved.time_ns)
        candidates = [*([] if moving is None else [moving]), *other.schedules]
        return bounded(problem, answer("auto", problem, candidates), self.effort)

    def _recomputing(self, problem: Problem, portfolio: Portfolio, beaten_ns: int | None = None) -> Solution:
        optimum = (
            shortest(portfolio.exact, problem.budget_bytes) if self.exact and affordable(portfolio.exact) else None
        )
        solution = None if optimum is None else _exact_answer(problem, portfolio, optimum)
        solution = solution or self._searched(problem, portfolio, beaten_ns)
        proven = optimum is not None and not optimum.found and portfolio.floor.bounding and not solution.status.solved
        return dataclasses.replace(solution, status=Status.INFEASIBLE) if proven else solution

    def _searched(self, problem: Problem, portfolio: Portfolio, beaten_ns: int | None) -> Solution:
        """Search; if nothing fits, search again among schedules that free forward outputs and recompute them before the
        hand-over."""
        solution = search_sequences(problem, portfolio, self.effort, beaten_ns=beaten_ns)
        lowest = solution.lowest_schedule
        if solution.status.solved or lowest is None or not outputs_in_the_way(problem.graph, problem.costs, lowest):
            return solution
        released = make_portfolio(problem.graph, problem.costs, problem.seed, released=True)
        found = search_sequences(problem, released, self.effort, beaten_ns=beaten_ns)
        if found.status.solved or (found.minimum_bytes or 0) >= (solution.minimum_bytes or 0):
            return found if found.status.solved else solution
        proven = Status.INFEASIBLE in (solution.status, found.status)
        return dataclasses.replace(found, status=Status.INFEASIBLE if proven else found.status)


def _exact_answer(problem: Problem, portfolio: Portfolio, optimum: Path) -> Solution | None:
    """Make the answer of the exact search: its optimum, or, if nothing fits, the schedule with the least peak. ``None`` if that
    is not found exactly either."""
    if optimum.found:
        exact = portfolio.floor.bounding
        found = Status.OPTIMAL if exact else Status.FEASIBLE
        solution = answer("auto", problem, [portfolio.schedule_of(optimum.nodes)], found=found)
        return solution if exact or not solution.status.solved else _bounded(problem, portfolio, solution)
    lowest = smallest_exactly(portfolio)
    return None if lowest is None else answer("auto", problem, [lowest])


def _bounded(problem: Problem, portfolio: Portfolio, solution: Solution) -> Solution:
    """Add a lower bound: the time of the shortest path of the ``floor`` model, or a lower bound on it."""
    below = shortest(portfolio.floor, problem.budget_bytes)
    if below is not None and below.found:
        return bounded_by(solution, below.time_ns)
    return bounded_by(solution, prove_time(portfolio.floor, problem.budget_bytes, known_ns=solution.time_ns).ns)

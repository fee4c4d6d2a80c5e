"""A compute sequence inside a budget, fast: for whoever has to go on and cannot wait for a good one."""

from __future__ import annotations

from lowtide.ir import Compute, Costs, Graph, simulate
from lowtide.solve.minimum import lowest_candidate
from lowtide.solve.model.sweep import quickest

_SHARE = 0.2  # of the iterations of a search for the lowest peak at default effort


def sequence_within(graph: Graph, costs: Costs, budget_bytes: int, seed: int = 0) -> tuple[int, tuple[int, ...]]:
    """Op ids in the order in which they are computed, and the peak of their schedule. The quickest of the greedy
    sequences that fit; where none does, the lowest that a search meets until it fits, so that a peak above the budget
    says that none was found, and proves nothing. Deterministic."""
    from lowtide.solve.search.portfolio import make_portfolio

    portfolio = make_portfolio(graph, costs, seed)
    met = [point for point in portfolio.greedy(budget_bytes) if point.peak_bytes <= budget_bytes]
    found = quickest(met)[0] if met else lowest_candidate(portfolio, budget_bytes, _SHARE)
    schedule = portfolio.schedule(found)
    computes = tuple(step.op for step in schedule.steps if isinstance(step, Compute))
    return simulate(graph, costs, schedule).peak_bytes, computes

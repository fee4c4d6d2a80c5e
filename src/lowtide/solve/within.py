"""A compute sequence inside a budget, fast: for whoever has to go on and cannot wait for a good one."""

from __future__ import annotations

from lowtide.ir import Costs, Graph, Schedule, schedule_from_sequence, simulate
from lowtide.ir.schedule import Compute
from lowtide.solve.minimum import lowest_candidate
from lowtide.solve.model.tables import decode

_SHARE = 0.2  # of the iterations of a search for the lowest peak at default effort


def sequence_within(graph: Graph, costs: Costs, budget_bytes: int, seed: int = 0) -> tuple[int, tuple[int, ...]]:
    """Op ids in the order in which they are computed, and the peak of their schedule.

    The quickest of the greedy sequences that fit; where none does, the lowest that a search meets until it fits, so that a
    peak above the budget says that none was found, and proves nothing. Deterministic.
    """
    from lowtide.solve.search.portfolio import make_portfolio

    portfolio = make_portfolio(graph, costs, seed)
    met = [point for point in portfolio.greedy(budget_bytes) if point.peak_bytes <= budget_bytes]
    met.sort(key=lambda point: (point.recompute_ns, point.peak_bytes))
    if not met:
        met = [lowest_candidate(portfolio, budget_bytes, _SHARE)]
    schedule = schedule_from_sequence(graph, decode(portfolio.model, met[0].codes))
    return simulate(graph, costs, schedule).peak_bytes, _computes(schedule)


def _computes(schedule: Schedule) -> tuple[int, ...]:
    return tuple(step.op for step in schedule.steps if isinstance(step, Compute))

"""Plans that follow the budget down."""

from __future__ import annotations

import pytest

from lowtide.ir import simulate
from lowtide.solve import threads
from lowtide.solve.minimum import minimum_peak
from lowtide.solve.model.sweep import quickest
from lowtide.solve.search.memory_paths import shortest
from lowtide.solve.search.portfolio import make_portfolio
from lowtide.solve.search.tightening import tightened
from tests.solve.small_graphs import chain, small_graph


def test_never_above_the_budget_nor_quicker_than_the_optimum() -> None:
    compared = 0
    for seed in range(16):
        graph, costs = small_graph(seed, 7)
        least, _ = minimum_peak(graph, costs)
        portfolio = make_portfolio(graph, costs, 0)
        optimum = shortest(portfolio.model, least)
        if optimum is None or not portfolio.model.faithful:
            continue
        for found in tightened(portfolio, least, 200):
            result = simulate(graph, costs, portfolio.schedule(found))
            assert result.peak_bytes <= least
            assert optimum.time_ns <= result.time_ns, seed
            compared += 1
    assert compared > 8


def test_with_room_for_two_more_it_is_quicker_than_the_lowest_plan() -> None:
    graph, costs = chain(16, times=tuple(1 + step % 7 for step in range(32)))
    least, lowest = minimum_peak(graph, costs)
    portfolio = make_portfolio(graph, costs, 0)
    found = tightened(portfolio, least + 8, 1_000)
    assert found and quickest(found)[0].recompute_ns < portfolio.of_schedule(lowest).recompute_ns


def test_the_number_of_cores_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = chain(12)
    least, _ = minimum_peak(graph, costs)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(threads, "available_cores", lambda cores=cores: cores)
        found.append([one.codes.tolist() for one in tightened(make_portfolio(graph, costs, 0), least * 2, 200)])
    assert found[0] == found[1] and found[0]

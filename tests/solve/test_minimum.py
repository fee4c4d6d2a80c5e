"""The search for the lowest peak against every schedule of tiny graphs, and against itself."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.ir import simulate
from lowtide.solve import Problem, minimum, minimum_peak, peak_lower_bound, solve, working_set_bound
from lowtide.solve.minimum import lowest_candidate, lowest_candidates, quicker
from lowtide.solve.search.portfolio import make_portfolio
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds


def test_never_below_the_least_peak_and_hardly_ever_above() -> None:
    """With what is handed to the caller there from then on, which the least peak need not have."""
    total = equal = 0
    for seed in seeds(60, 150):
        graph, costs = small_graph(seed, 5 + seed % 3)
        if seed % 2:
            graph, costs = overwriting(graph, costs, seed)
        portfolio, least = make_portfolio(graph, costs, 0), brute_force(graph, costs, None)
        assert least is not None
        found = simulate(graph, costs, portfolio.schedule(lowest_candidate(portfolio, 0))).peak_bytes
        assert found >= least, seed
        total, equal = total + 1, equal + (found == least)
    assert equal >= 0.9 * total


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_found_again_with_a_target(seed: int) -> None:
    """And a target that is easier ends it earlier, with something quicker."""
    graph, costs = random_graph(seed, 80)
    portfolio = make_portfolio(graph, costs, 0)
    found = lowest_candidate(portfolio, 0)
    again = lowest_candidate(make_portfolio(graph, costs, 0), found.peak_bytes)
    assert again.peak_bytes == found.peak_bytes
    easy = (found.peak_bytes + portfolio.keep_all().peak_bytes) // 2
    sooner = lowest_candidate(portfolio, easy)
    assert found.peak_bytes <= sooner.peak_bytes <= easy
    assert sooner.recompute_ns <= found.recompute_ns


def test_what_one_search_misses_another_may_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches this short often do; where the first stays far above, it is the only one in a program of many operators. In
    others the least that is named is the least of all, for a budget next to it is met by any."""
    monkeypatch.setattr(minimum, "_answers", {})
    monkeypatch.setattr(minimum, "_ROUNDS", 1)
    monkeypatch.setattr(minimum, "_ROUND", 100)
    missed = 0
    for seed in range(8):
        graph, costs = random_graph(seed, 60)
        portfolio = make_portfolio(graph, costs, 0)
        first, *others = [lowest_candidate(portfolio, 0, variant).peak_bytes for variant in range(4)]
        if min(others) < first:
            solution = solve(Problem(graph, costs, min(others)), "auto")
            assert solution.status.solved and solution.peak_bytes <= min(others), seed
            assert solve(Problem(graph, costs, 1), "auto").minimum_bytes == min(others)
            assert minimum_peak(graph, costs)[0] <= min(others)
            with monkeypatch.context() as many:
                many.setattr(minimum, "_SMALL_NODES", 1)
                assert len(lowest_candidates(portfolio, first // 2)) == 1
            missed += 1
    assert missed


def test_what_was_asked_before_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever tries several budgets, or several ways to meet one, asks it. Another question has another answer."""
    monkeypatch.setattr(minimum, "_answers", {})
    graph, costs = random_graph(5, 80)
    first = lowest_candidate(make_portfolio(graph, costs, 0), 0)
    searched = minimum._lowered
    asked: list[int] = []
    monkeypatch.setattr(minimum, "_lowered", lambda *one: asked.append(one[1]) or searched(*one))
    again = lowest_candidate(make_portfolio(graph, costs, 0), 0)
    assert not asked
    assert again.codes.tolist() == first.codes.tolist() and again[1:] == first[1:]
    others = [(make_portfolio(graph, costs, 1), 0), (make_portfolio(graph, costs, 0), first.peak_bytes)]
    others.append((make_portfolio(graph, dataclasses.replace(costs, time_ns=costs.time_ns * 2), 0), 0))
    for portfolio, target in others:
        asked.clear()
        lowest_candidate(portfolio, target)
        assert asked
    monkeypatch.setattr(minimum, "_lowered", lambda *_: first)
    for seed in range(2, 2 + minimum._KEPT):
        lowest_candidate(make_portfolio(graph, costs, seed), 0)
    assert len(minimum._answers) == minimum._KEPT


@pytest.mark.parametrize("seed", [7, 11])
def test_a_peak_that_nothing_goes_below_ends_the_search(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one round, also where no operator takes that much by itself."""
    graph, costs = small_graph(seed, 12)
    rounds, run = [], minimum.in_threads
    monkeypatch.setattr(minimum, "in_threads", lambda *asked: rounds.append(asked) or run(*asked))
    found = minimum._lowest(make_portfolio(graph, costs, 0), 0, 0)
    assert found.peak_bytes == peak_lower_bound(graph, costs) > working_set_bound(graph, costs)
    assert len(rounds) == 1


def test_short_runs_stay_within_the_budget_and_save_time() -> None:
    graph, costs = chain(40, size=1000)
    portfolio = make_portfolio(graph, costs, 0)
    lowest = lowest_candidate(portfolio, 0)
    found = quicker(portfolio, lowest, lowest.peak_bytes)
    assert found and all(one.peak_bytes <= lowest.peak_bytes for one in found)
    assert min(one.recompute_ns for one in found) < lowest.recompute_ns


@pytest.mark.parametrize("effort", [0, 1])
def test_every_effort_meets_the_least_budget(effort: int) -> None:
    graph, costs = random_graph(3, 120)
    least, _ = minimum_peak(graph, costs)
    assert solve(Problem(graph, costs, least), f"auto{{effort={effort}}}").status.solved
    below = solve(Problem(graph, costs, least - 1), f"auto{{effort={effort}}}")
    assert below.minimum_bytes == least and not below.status.solved

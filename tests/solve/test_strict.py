"""Runs that stay within the budget, for budgets near the least one; and what is said of such budgets."""

from __future__ import annotations

import dataclasses

from lowtide.ir import simulate
from lowtide.solve import schedules_above
from lowtide.solve.auto import Auto
from lowtide.solve.bounds import least_time, prove_time
from lowtide.solve.minimum import minimum_peak
from lowtide.solve.model.compact import compact
from lowtide.solve.problem import Problem
from lowtide.solve.search.memory_paths import shortest
from lowtide.solve.search.portfolio import AnnealRun, make_portfolio
from tests.solve.small_graphs import chain, small_graph


def test_never_quicker_than_the_optimum_nor_slower_than_the_start() -> None:
    compared = 0
    for seed in range(60):
        graph, costs = small_graph(seed, 7)
        least, schedule = minimum_peak(graph, costs)
        portfolio = make_portfolio(graph, costs, 0)
        start, optimum = portfolio.of_schedule(schedule), shortest(portfolio.model, least)
        if optimum is None or not portfolio.model.faithful:
            continue
        for found in portfolio.round([AnnealRun(start, 1, 1.0, strict=True)], least, 2_000, 0):
            result = simulate(graph, costs, portfolio.schedule(found))
            assert result.peak_bytes <= least
            assert optimum.time_ns <= result.time_ns <= simulate(graph, costs, schedule).time_ns, seed
            compared += 1
    assert compared > 30


def test_a_schedule_and_its_candidate_are_the_same() -> None:
    for seed in range(40):
        graph, costs = small_graph(seed, 7)
        portfolio = make_portfolio(graph, costs, 0)
        schedule = Auto(effort=1).solve(Problem(graph, costs, minimum_peak(graph, costs)[0])).schedule
        assert schedule is not None
        before = simulate(graph, costs, schedule)
        after = simulate(graph, costs, portfolio.schedule(portfolio.of_schedule(schedule)))
        assert (after.peak_bytes, after.time_ns) == (before.peak_bytes, before.time_ns), seed


def test_what_is_said_of_the_least_budget_is_between_the_bound_and_what_was_found_first() -> None:
    graph, costs = chain(30, times=tuple(1 + step % 7 for step in range(60)))
    costs = dataclasses.replace(costs, storage_bytes=costs.storage_bytes * 10 - costs.time_ns)
    least, lowest = minimum_peak(graph, costs)
    found = schedules_above(graph, costs, lowest)
    assert found == schedules_above(graph, costs, lowest)
    runs = [(budget, simulate(graph, costs, schedule)) for budget, schedule in found]
    assert all(run.peak_bytes <= budget for budget, run in runs)
    said = [(budget, run.time_ns) for budget, run in runs]
    assert [budget for budget, _ in said] == [least, least * 102 // 100]
    assert said[1][1] <= said[0][1] < simulate(graph, costs, lowest).time_ns
    model = compact(graph, costs)
    for budget, time_ns in said:
        assert least_time(model) < prove_time(model, budget).refined(2).ns <= time_ns

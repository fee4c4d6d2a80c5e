"""Planners against every schedule of tiny graphs."""

from __future__ import annotations

import pytest

from lowtide.ir import Costs, Graph, keep_all_schedule, simulate
from lowtide.solve import Problem, Status, minimum_peak, solve
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import small_graph
from tests.support.overwriting import overwriting
from tests.support.wide import seeds


def make(seed: int) -> tuple[Graph, Costs]:
    """Of two graphs, one has operators that write over what they read."""
    graph, costs = small_graph(seed, 5 + seed % 3)
    return (graph, costs) if seed % 2 else overwriting(graph, costs, seed)


def cases(seed: int) -> list[int]:
    """Budgets around the least peak, halfway, and just below the peak without recomputation."""
    graph, costs = make(seed)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    least = brute_force(graph, costs, None)
    assert least is not None
    return sorted({least - 1, least, (least + top) // 2, top - 1})


def compare(seeds: range, planner: str) -> tuple[int, int]:
    """(cases, cases in which the planner is as quick as the optimum); anything wrong fails."""
    total = equal = 0
    for seed in seeds:
        graph, costs = make(seed)
        for budget in cases(seed):
            optimum = brute_force(graph, costs, budget)
            solution = solve(Problem(graph, costs, budget), planner)
            total += 1
            if optimum is None:
                assert not solution.status.solved
                assert solution.minimum_bytes is not None and solution.minimum_bytes > budget
                equal += 1
                continue
            assert solution.status is not Status.INFEASIBLE, (seed, budget)
            if solution.status.solved:
                assert solution.time_ns >= optimum, (seed, budget)
                equal += solution.time_ns == optimum
            if solution.status is Status.OPTIMAL:
                assert solution.time_ns == solution.lower_bound_ns == optimum
    return total, equal


def test_auto_equals_the_optimum() -> None:
    chosen = seeds(100, 230)
    total, equal = compare(chosen, "auto")
    assert total > 500 / 230 * len(chosen)
    assert equal == total


@pytest.mark.slow
def test_auto_equals_the_optimum_in_more_cases() -> None:
    total, equal = compare(range(230, 1000), "auto")
    assert equal == total


def test_the_search_alone_is_nearly_always_optimal() -> None:
    total, equal = compare(range(30), "auto{effort=1,exact=false}")
    assert equal >= 0.95 * total


@pytest.mark.parametrize(
    ("planner", "optimal"),
    [
        ("keep-all", 89),
        ("greedy", 153),
        ("dtr", 155),
        ("rotor", 102),
        ("rockmate", 102),
        ("h-rockmate", 105),
        ("chen-sqrt", 92),
    ],
)
def test_other_planners_are_never_better_than_the_optimum(planner: str, optimal: int) -> None:
    """And as good as it in as many cases as ever; keeping everything is where nothing fits or there is no need."""
    assert compare(range(60), planner) == (164, optimal)


@pytest.mark.parametrize(
    ("planner", "optimal"), [("checkmate", 84), ("checkmate{form=full,warm-start=false}", 82), ("checkmate-approx", 78)]
)
def test_planners_that_prove_are_right(planner: str, optimal: int) -> None:
    """Where what is written over depends on the schedule, they prove less, and nothing wrong."""
    pytest.importorskip("highspy")
    total, equal = compare(range(0, 60, 2), planner)
    assert total == 84
    assert equal >= optimal


def test_auto_is_infeasible_exactly_when_nothing_fits() -> None:
    for seed in seeds(30, 60):
        graph, costs = make(seed)
        least = brute_force(graph, costs, None)
        assert least is not None
        below = solve(Problem(graph, costs, least - 1))
        assert below.status is Status.INFEASIBLE and below.minimum_bytes == least and below.schedule is None
        assert solve(Problem(graph, costs, least)).status is Status.OPTIMAL
        assert minimum_peak(graph, costs)[0] == least

"""A budget on addresses: held where it can be, and never at the expense of what is proven."""

from __future__ import annotations

import pytest

from lowtide.ir import keep_all_schedule, simulate
from lowtide.place import solve_placed
from lowtide.solve import Problem, Status, solve
from tests.solve.small_graphs import chain, small_graph
from tests.support.wide import seeds


def test_a_schedule_that_peaks_lower_where_addresses_take_up_more() -> None:
    """Tensors of 15 bytes at multiples of 16: what is counted in the budget is placed above it."""
    graph, costs = chain(6, size=15)
    whole = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    found = solve_placed(Problem(graph, costs, whole), "greedy", alignment=16)
    assert found.layout is not None
    assert found.counted.peak_bytes == whole
    assert found.layout.reserved_bytes <= whole
    assert found.solution.peak_bytes < whole
    assert found.solution.time_ns > found.counted.time_ns
    assert found.solution.lower_bound_ns == found.counted.lower_bound_ns
    assert found.layout.schedule == found.solution.schedule


def test_the_lowest_is_given_where_none_fits() -> None:
    graph, costs = chain(6, size=5)
    least = solve(Problem(graph, costs, 1), "greedy").minimum_bytes
    assert least is not None
    found = solve_placed(Problem(graph, costs, least), "greedy", alignment=64)
    assert found.layout is not None
    assert found.layout.reserved_bytes > least
    assert found.solution.schedule == found.layout.schedule


def test_no_schedule_no_addresses() -> None:
    graph, costs = chain(6, size=5)
    found = solve_placed(Problem(graph, costs, 1), "greedy")
    assert found.layout is None
    assert not found.solution.status.solved


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_the_budget_holds_and_costs_nothing_where_addresses_fit(seed: int) -> None:
    graph, costs = small_graph(seed, ops=8)
    whole = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    found = solve_placed(Problem(graph, costs, whole + 100), "greedy")
    assert found.solution == found.counted
    assert found.layout is not None
    assert found.layout.reserved_bytes <= whole + 100
    assert found.solution.status is not Status.INFEASIBLE

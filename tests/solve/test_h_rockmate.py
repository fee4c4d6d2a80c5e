"""``h-rockmate``: valid, never below the optimum, monotone in the budget, its minimum reached."""

from __future__ import annotations

import pytest

from lowtide.errors import PlanError
from lowtide.ir import keep_all_schedule, simulate
from lowtide.solve import Problem, Status, get_planner, solve
from tests.solve.block_checks import (
    assert_minimum_is_reached,
    assert_more_budget_is_never_slower,
    assert_never_below_the_optimum,
    assert_scale_does_not_matter,
)
from tests.solve.test_blocks import transformer
from tests.support.random_graphs import random_graph

SPEC = "h-rockmate"


@pytest.mark.parametrize("seed", range(25))
def test_never_below_the_optimum(seed: int) -> None:
    assert_never_below_the_optimum(SPEC, seed)


def test_more_budget_is_never_slower() -> None:
    assert_more_budget_is_never_slower(SPEC, *transformer(10))


@pytest.mark.parametrize("seed", range(8))
def test_the_minimum_reported_is_reached(seed: int) -> None:
    assert_minimum_is_reached(SPEC, *random_graph(seed, 60))


def test_scaled_times_give_the_same_schedule() -> None:
    assert_scale_does_not_matter(SPEC, *transformer(8), 0.5)


def test_not_slower_than_rotor_where_rotor_fits() -> None:
    graph, costs = transformer(12)
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    for share in (0.3, 0.5, 0.7):
        problem = Problem(graph, costs, int(share * peak))
        found, rotor = solve(problem, SPEC), solve(problem, "rotor")
        assert found.status is Status.FEASIBLE
        assert not rotor.status.solved or found.time_ns <= rotor.time_ns


@pytest.mark.parametrize("option", ["options=1", "slots=-1"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(PlanError, match="write for instance"):
        get_planner(f"{SPEC}{{{option}}}")

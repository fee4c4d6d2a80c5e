"""``rockmate`` and ``h-rockmate``: valid, never below the optimum, monotone in the budget, its minimum reached."""

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
from tests.support.wide import seeds

SPECS = pytest.mark.parametrize("spec", ["rockmate", "h-rockmate"])


@SPECS
@pytest.mark.parametrize("seed", seeds(8, 25))
def test_never_below_the_optimum(spec: str, seed: int) -> None:
    assert_never_below_the_optimum(spec, seed)


@SPECS
def test_more_budget_is_never_slower(spec: str) -> None:
    assert_more_budget_is_never_slower(spec, *transformer(10))


@SPECS
@pytest.mark.parametrize("seed", range(8))
def test_the_minimum_reported_is_reached(spec: str, seed: int) -> None:
    assert_minimum_is_reached(spec, *random_graph(seed, 60))


@SPECS
def test_scaled_times_give_the_same_schedule(spec: str) -> None:
    assert_scale_does_not_matter(spec, *transformer(8), 0.5)


@SPECS
def test_not_slower_than_rotor_where_rotor_fits(spec: str) -> None:
    graph, costs = transformer(12)
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    compared = 0
    for share in (0.3, 0.5, 0.7):
        problem = Problem(graph, costs, int(share * peak))
        found, rotor = solve(problem, spec), solve(problem, "rotor")
        assert found.status is Status.FEASIBLE
        if rotor.status.solved:
            assert found.time_ns <= rotor.time_ns
            compared += 1
    assert compared > 1


@SPECS
@pytest.mark.parametrize("option", ["options=1", "slots=-1"])
def test_options_out_of_range_are_refused(spec: str, option: str) -> None:
    with pytest.raises(PlanError, match="write for instance"):
        get_planner(f"{spec}{{{option}}}")

"""Overhead against budget: never rising with the budget, never below its bound, and met by plans."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lowtide.errors import PlanError
from lowtide.ir.serial import dag_from_json, read_json
from lowtide.planning import Plan, make_plan
from lowtide.report.curve import Curve, CurvePoint, make_curve
from tests.support.chains import LAYER_BYTES, chain_dag
from tests.support.random_graphs import random_graph

GRAPH, COSTS = dag_from_json(chain_dag())


def _check(curve: Curve) -> None:
    top = curve.points[0]
    assert top.budget_bytes == curve.unconstrained_peak_bytes
    assert curve.overhead(top.time_ns) <= 0  # less than nothing where ops are dead
    assert curve.minimum_bytes >= curve.lower_bound_bytes
    for point in curve.points:
        assert point.peak_bytes <= point.budget_bytes
        assert point.lower_bound_ns is None or point.lower_bound_ns <= point.time_ns
    for larger, smaller in itertools.pairwise(curve.points):
        assert smaller.budget_bytes < larger.budget_bytes
        assert smaller.time_ns >= larger.time_ns
        if smaller.lower_bound_ns is not None:
            assert larger.lower_bound_ns is None or larger.lower_bound_ns <= smaller.lower_bound_ns


@pytest.mark.parametrize("seed", range(6))
def test_of_random_graphs(seed: int) -> None:
    graph, costs = random_graph(seed, 8 + 6 * seed)
    _check(make_curve(graph, costs, points=5))


@pytest.mark.parametrize("planner", ["greedy", "chen-sqrt", "keep-all"])
def test_of_other_planners(planner: str) -> None:
    curve = make_curve(GRAPH, COSTS, points=4, planner=planner)
    _check(curve)
    assert curve.planner == planner


def test_every_point_is_planned_within_its_budget() -> None:
    curve = make_curve(GRAPH, COSTS, points=5)
    for point in curve.points:
        plan = make_plan(GRAPH, COSTS, budget=point.budget_bytes, planner="auto{effort=1}")
        assert plan.time_ns == point.time_ns  # the graph is small enough for exact answers


def test_of_a_plan_has_its_budget(tmp_path: Path) -> None:
    plan = make_plan(GRAPH, COSTS, budget="70%").with_curve(points=3)
    curve = plan.known_curve
    assert curve is not None
    _check(curve)
    (own,) = [point for point in curve.points if point.budget_bytes == plan.budget_bytes]
    assert own.time_ns <= plan.time_ns
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").known_curve == curve


def test_quicker_and_better_bounded_points_count_for_their_neighbours() -> None:
    slow = CurvePoint(5 * LAYER_BYTES, 5 * LAYER_BYTES, COSTS.total_time_ns * 9, COSTS.total_time_ns)
    curve = make_curve(GRAPH, COSTS, points=3, known=[slow])
    _check(curve)
    assert slow.time_ns not in [point.time_ns for point in curve.points]


def test_given_budgets() -> None:
    """Each that can be met is a point, those that cannot are not, and the least that can stays the last."""
    whole = make_curve(GRAPH, COSTS, points=2).unconstrained_peak_bytes
    budgets = [whole * share // 100 for share in (80, 60)]
    curve = make_curve(GRAPH, COSTS, budgets=[*budgets, 1])
    assert [point.budget_bytes for point in curve.points] == [whole, *budgets, curve.minimum_bytes]
    assert all(point.peak_bytes <= point.budget_bytes for point in curve.points)


def test_golden() -> None:
    assert str(make_curve(GRAPH, COSTS, points=4)) == GOLDEN


def test_files(tmp_path: Path) -> None:
    curve = make_curve(GRAPH, COSTS, points=3)
    curve.save(tmp_path / "curve.json")
    data = read_json(tmp_path / "curve.json")
    assert Curve.from_json(data) == curve
    with pytest.raises(PlanError, match="lowtide-curve/1"):
        Curve.from_json({"format": "lowtide-curve/2"})
    with pytest.raises(PlanError, match="malformed"):
        Curve.from_json({**data, "points": [{}]})


GOLDEN = """\
 budget  of the peak  overhead  lower bound
-------  -----------  --------  -----------
6.8 KiB      100.0 %     0.0 %        0.0 %
5.1 KiB       74.0 %     9.1 %        9.1 %
3.7 KiB       53.8 %    60.6 %       60.6 %
2.9 KiB       42.9 %    60.6 %       60.6 %
2.9 KiB is the least budget of all: no schedule peaks lower"""


@pytest.mark.parametrize("points", [1, 1001])
def test_too_few_and_too_many_points(points: int) -> None:
    with pytest.raises(PlanError, match="from 2 to 1000 points"):
        make_curve(GRAPH, COSTS, points=points)

"""Plans: made, saved, loaded, refused."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowtide.errors import InfeasibleBudgetError, LowtideError, PlanError, ScheduleError
from lowtide.ir import simulate
from lowtide.ir.serial import dag_from_json
from lowtide.planning import Plan, make_plan
from lowtide.planning.make import infeasible
from lowtide.solve import Problem, Solution, Status, minimum_peak
from tests.solve.small_graphs import chain
from tests.support.chains import LAYER_BYTES, chain_dag

GRAPH, COSTS = dag_from_json(chain_dag())


def _plan(**changes: Any) -> Plan:
    return make_plan(GRAPH, COSTS, **{"budget": "70%", **changes})


def test_plan_fits_and_costs_what_it_says() -> None:
    plan = _plan()
    assert plan.peak_bytes <= plan.budget_bytes == plan.unconstrained_peak_bytes * 70 // 100
    assert plan.overhead == plan.time_ns / COSTS.total_time_ns - 1 > 0


def test_full_budget_recomputes_nothing() -> None:
    plan = _plan(budget="100%")
    assert plan.overhead == 0
    assert plan.peak_bytes == plan.unconstrained_peak_bytes


def test_save_and_load(tmp_path: Path) -> None:
    plan = _plan(seed=3)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.graph, loaded.schedule, loaded.planner) == (plan.graph, plan.schedule, plan.planner)
    assert (loaded.peak_bytes, loaded.time_ns, loaded.budget_bytes) == (
        plan.peak_bytes,
        plan.time_ns,
        plan.budget_bytes,
    )
    assert (loaded.seed, loaded.lower_bound_ns, str(loaded)) == (3, plan.lower_bound_ns, str(plan))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_addresses_are_found_once_and_for_this_schedule() -> None:
    plan = _plan()
    assert plan.layout is plan.layout
    assert plan.reserved_bytes == plan.layout.reserved_bytes >= plan.peak_bytes
    other = _plan(budget="100%")
    changed = plan.with_schedule(other.schedule, simulate(GRAPH, COSTS, other.schedule))
    assert changed.schedule is other.schedule
    assert changed.layout.schedule is other.schedule
    assert "_layout" not in str(plan.to_json().keys()) + repr(plan)
    loaded = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert loaded.layout.offsets == plan.layout.offsets


def test_what_a_plan_takes_on_cuda() -> None:
    """Tensors of a kilobyte share a segment; of 3 MiB, they take segments of 20 MiB for six."""
    assert _plan().cuda_memory().reserved_bytes == 2 << 20
    costs = dataclasses.replace(COSTS, storage_bytes=COSTS.storage_bytes // LAYER_BYTES * (3 << 20))
    plan = make_plan(GRAPH, costs, budget="100%")
    for expandable in (False, True):
        found = plan.cuda_memory(expandable_segments=expandable)
        assert found.reserved_bytes % (20 << 20) == 0
        assert plan.peak_bytes <= found.allocated_bytes <= found.reserved_bytes < plan.peak_bytes + (40 << 20)


def test_infeasible_names_a_reachable_minimum_and_the_bottleneck() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"KiB\).*smallest budget.*KiB.*Raise the budget") as caught:
        _plan(budget=2 * LAYER_BYTES)
    minimum = caught.value.minimum_bytes
    assert minimum > 2 * LAYER_BYTES
    assert caught.value.operator in {op.name for op in GRAPH.ops}
    assert _plan(budget=minimum).peak_bytes <= minimum


def test_infeasible_names_a_minimum_that_the_planner_does_not_tell() -> None:
    problem, unsolved = Problem(GRAPH, COSTS, 1), Solution("chen-sqrt", Status.UNSOLVED, None, 0, 0)
    least, _ = minimum_peak(GRAPH, COSTS)
    assert infeasible(problem, unsolved, 1, "chen-sqrt").minimum_bytes == least
    told = dataclasses.replace(unsolved, minimum_bytes=least + 1)
    assert infeasible(problem, told, 1, "chen-sqrt").minimum_bytes == least + 1


def test_infeasible_says_what_the_least_budget_costs_and_what_a_little_more_saves() -> None:
    graph, costs = chain(40, size=1000)
    with pytest.raises(InfeasibleBudgetError) as caught:
        make_plan(graph, costs, budget=3000, planner="auto{effort=1}")
    error = caught.value
    (least, dear), (more, less) = error.overheads
    assert (least, more) == (error.minimum_bytes, error.minimum_bytes * 102 // 100)
    assert 0 < less <= dear
    assert f"{least} bytes" in error.message and f"at about {100 * dear:.0f} % more time" in error.message
    for budget, overhead in error.overheads:
        better = make_plan(graph, costs, budget=budget, planner="auto{effort=1}")
        assert better.overhead <= overhead + 0.05  # what was named is there to be had
    with pytest.raises(InfeasibleBudgetError, match=r"% more time\. The bottleneck") as caught:
        make_plan(graph, costs, budget=3000, planner="chen-sqrt")
    assert [budget for budget, _ in caught.value.overheads] == [caught.value.minimum_bytes]


def test_a_little_more_than_the_least_budget_is_named_where_it_saves_much() -> None:
    graph, costs = chain(24, size=1000)
    costs = dataclasses.replace(costs, storage_bytes=10 * costs.storage_bytes - np.arange(48) * 37 % 101)
    with pytest.raises(InfeasibleBudgetError, match="; with 2 % more, ") as caught:
        make_plan(graph, costs, budget=2000, planner="auto{effort=1}")
    (_, dear), (more, less) = caught.value.overheads
    assert less < dear
    assert f"{more} bytes" in caught.value.message and f"it is about {100 * less:.0f} %" in caught.value.message


def test_unknown_planner() -> None:
    with pytest.raises(PlanError, match="known: auto"):
        _plan(planner="fastest")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "not an object"),
        ("{", "not JSON"),
        ("{}", "not a saved plan"),
        ('{"format": "lowtide-plan/2"}', "lowtide-plan/1"),
        ('{"format": "lowtide-plan/1"}', "not a complete plan"),
    ],
)
def test_load_refuses(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=reason):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("schedule", None, "lowtide-schedule/1"),
        ("graph", [1], "lowtide-graph/1"),
        ("curve", 5, "lowtide-curve/1"),
        ("curve", "lowtide-curve/1", "found a str"),
        ("budget_bytes", float("inf"), "not a complete plan"),
        ("budget_bytes", 1e30, "not a complete plan"),
        ("budget_bytes", -1, "not a complete plan"),
        ("lower_bound_ns", float("inf"), "not a complete plan"),
        ("lower_bound_ns", 1 << 61, "less than the bound"),
        ("solve_seconds", 10**400, "not a complete plan"),
        ("solve_seconds", float("nan"), "not a complete plan"),
        ("seed", -1, "not a complete plan"),
        ("planner", None, "not a complete plan"),
    ],
)
def test_load_refuses_damaged_plans(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(PlanError, match=reason):
        Plan.load(path)


_ODD = [None, True, -1, 1e30, 10**400, 2.5, float("inf"), float("nan"), "", "x", [], {}, [None]]


def _places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a JSON document."""
    yield place
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield from _places(value, (*place, key))


def _changed(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    key, *others = place
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[key] = _changed(data[key], tuple(others), value)
    return copy


def test_plans_with_anything_in_any_place_load_or_are_refused(tmp_path: Path) -> None:
    """Costs, sizes, ids, names and lists of every kind: an error of ours, or a plan that can be rendered and saved."""
    path = tmp_path / "plan.json"
    _plan(planner="greedy").save(path)
    data = json.loads(path.read_text())
    source = random.Random(0)
    refused = 0
    for place in source.choices([*_places(data)], k=400):
        path.write_text(json.dumps(_changed(data, place, source.choice(_ODD))))
        try:
            str(Plan.load(path))
        except LowtideError:
            refused += 1
    assert 200 < refused < 400


def test_a_seed_below_0() -> None:
    with pytest.raises(PlanError, match="seed is -1"):
        _plan(seed=-1)


def test_load_checks_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _plan().save(path)
    data = json.loads(path.read_text())
    data["schedule"]["steps"].insert(0, ["compute", 5])
    path.write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match="step 0"):
        Plan.load(path)


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    _plan().save(tmp_path / "plan.json")
    (tmp_path / "other").touch()
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="cannot write"):
        _plan().save(tmp_path / "missing" / "plan.json")

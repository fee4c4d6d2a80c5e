"""The plan cache: found again by the same request only, never trusted, shared by processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli.main import main
from lowtide.ir import Schedule, keep_all_schedule, schedule_to_json, simulate
from lowtide.ir.serial import dag_from_json
from lowtide.planning import Plan, make_plan
from lowtide.planning.cache import FORMAT, PlanCache, PlanRequest
from tests.store.entries import signed
from tests.support.chains import chain_dag

GRAPH, COSTS = dag_from_json(chain_dag())
PEAK = simulate(GRAPH, COSTS, keep_all_schedule(GRAPH)).peak_bytes
REQUEST = PlanRequest(GRAPH, COSTS, PEAK * 7 // 10, "greedy", 0, ("torch 2",))


def _solved(request: PlanRequest = REQUEST) -> Plan:
    return make_plan(request.graph, request.costs, budget=request.budget_bytes, planner=request.planner)


def _entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_kept_plan_comes_back(tmp_path: Path) -> None:
    plan = _solved()
    assert PlanCache(tmp_path / "new").get(REQUEST) is None
    PlanCache(tmp_path / "new").put(REQUEST, plan)
    kept = PlanCache(tmp_path / "new").get(REQUEST)
    assert kept is not None and kept.cached and not plan.cached
    for field in dataclasses.fields(Plan):
        if field.name != "cached":
            assert getattr(kept, field.name) == getattr(plan, field.name), field.name


def _other_graph(request: PlanRequest) -> PlanRequest:
    first, *others = request.graph.ops
    renamed = dataclasses.replace(first, target="another")
    return dataclasses.replace(request, graph=dataclasses.replace(request.graph, ops=(renamed, *others)))


def _other_column(name: str) -> Callable[[PlanRequest], PlanRequest]:
    def change(request: PlanRequest) -> PlanRequest:
        column: Any = np.array(getattr(request.costs, name))
        column[-1] += 1
        return dataclasses.replace(request, costs=dataclasses.replace(request.costs, **{name: column}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _other_graph,
        _other_column("time_ns"),
        _other_column("workspace_bytes"),
        _other_column("storage_bytes"),
        lambda request: dataclasses.replace(request, costs=dataclasses.replace(request.costs, rng_state_bytes=1)),
        lambda request: dataclasses.replace(request, costs=dataclasses.replace(request.costs, device="another")),
        lambda request: dataclasses.replace(request, budget_bytes=request.budget_bytes - 1),
        lambda request: dataclasses.replace(request, planner="greedy{sweep=false}"),
        lambda request: dataclasses.replace(request, seed=1),
        lambda request: dataclasses.replace(request, versions=("torch 3",)),
    ],
)
def test_another_request_has_another_key(change: Callable[[PlanRequest], PlanRequest], tmp_path: Path) -> None:
    assert change(REQUEST).key != REQUEST.key
    PlanCache(tmp_path).put(REQUEST, _solved())
    assert PlanCache(tmp_path).get(change(REQUEST)) is None


def test_places_in_the_users_files_do_not_matter() -> None:
    moved = tuple(dataclasses.replace(op, source="model.py:7", module="block.1") for op in GRAPH.ops)
    assert dataclasses.replace(REQUEST, graph=dataclasses.replace(GRAPH, ops=moved)).key == REQUEST.key


def _damaged(data: dict[str, Any]) -> list[str]:
    entry = data["entry"]
    schedule = entry["schedule"]
    changes: list[dict[str, Any]] = [
        {"schedule": []},
        {"schedule": None},
        {"schedule": {**schedule, "steps": schedule["steps"][1:]}},
        {"schedule": {**schedule, "steps": []}},
        {"schedule": {**schedule, "steps": [["compute", 10**30]]}},
        {"schedule": {**schedule, "steps": [["free", -1]]}},
        {"schedule": {**schedule, "boundary": 1e30}},
        {"schedule": schedule_to_json(keep_all_schedule(GRAPH))},
        {"schedule": schedule_to_json(Schedule((), 0))},
        {"lower_bound_ns": float("inf")},
        {"lower_bound_ns": -1},
        {"lower_bound_ns": 10**400},
        {"lower_bound_ns": 1 << 61},
        {"solve_seconds": 10**400},
        {"solve_seconds": float("nan")},
        {"solve_seconds": -1.0},
        {"solve_seconds": "soon"},
        {"planner": None},
        {"seed": -1},
        {"budget_bytes": 1e30},
    ]
    return [
        "",
        "{",
        "[1, 2]",
        "\udc80",
        "[" * 100_000,
        signed("lowtide-cached-plan/0", entry),
        json.dumps({key: value for key, value in data.items() if key != "entry"}),
        json.dumps(data | {"entry": 7}),
        json.dumps(data | {"entry": entry | {"lower_bound_ns": 1}}),
        json.dumps(data)[:-20],
        *(signed(FORMAT, document) for document in ({}, None, [], 7)),
        *(signed(FORMAT, entry | change) for change in changes),
    ]


def test_damaged_entries_are_ignored_and_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PlanCache(tmp_path).put(REQUEST, _solved())
    path = _entry(tmp_path)
    for text in _damaged(json.loads(path.read_text())):
        caplog.clear()
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with caplog.at_level(logging.WARNING):
            assert PlanCache(tmp_path).get(REQUEST) is None, text
        assert str(path) in caplog.text
        PlanCache(tmp_path).put(REQUEST, _solved())
        assert PlanCache(tmp_path).get(REQUEST) is not None
        assert _entry(tmp_path) == path


def test_concurrent_writers_and_readers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = [dataclasses.replace(REQUEST, seed=seed) for seed in range(3)]
    plan = _solved()

    def work(turn: int) -> None:
        request = requests[turn % len(requests)]
        PlanCache(tmp_path).put(request, plan)
        kept = PlanCache(tmp_path).get(request)
        assert kept is not None and kept.schedule == plan.schedule

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(120)))
    assert not caplog.records
    assert len(list(tmp_path.iterdir())) == len(requests)


def test_the_entries_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.planning.cache.MOST_ENTRIES", 3)
    plan = _solved()
    requests = [dataclasses.replace(REQUEST, seed=seed) for seed in range(4)]
    for age, request in enumerate(requests[:3]):
        PlanCache(tmp_path).put(request, plan)
        os.utime(tmp_path / f"{request.key}.json", (age, age))
    assert PlanCache(tmp_path).get(requests[0]) is not None
    PlanCache(tmp_path).put(requests[3], plan)
    kept = [PlanCache(tmp_path).get(request) is not None for request in requests]
    assert kept == [True, False, True, True]


def test_a_folder_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        PlanCache(tmp_path / "file" / "below").put(REQUEST, _solved())
    assert "cannot be kept" in caplog.text


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(5)))


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LOWTIDE_PLAN_CACHE", raising=False)


@pytest.mark.usefixtures("_cache")
def test_the_same_model_is_planned_once(tmp_path: Path) -> None:
    sample = torch.randn(256, 16)
    first = lowtide.plan(_model(), (sample,), budget="60%", planner="greedy")
    again = lowtide.plan(_model(), (sample,), budget="60%", planner="greedy")
    assert (first.cached, again.cached) == (False, True)
    assert again.schedule == first.schedule
    assert not lowtide.plan(_model(), (sample,), budget="61%", planner="greedy").cached
    model = lowtide.rematerialize(_model(), (sample,), budget="60%", planner="greedy")
    (plan,) = lowtide.plans(model)
    assert plan.cached and plan.schedule == first.schedule
    assert len(list((tmp_path / "plans").iterdir())) == 2


@pytest.mark.usefixtures("_cache")
def test_the_variable_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "0")
    for _ in range(2):
        assert not lowtide.plan(_model(), (torch.randn(64, 16),), budget="60%", planner="greedy").cached
    assert not (tmp_path / "plans").exists()
    assert main(["env"]) == 0
    assert "off (LOWTIDE_PLAN_CACHE)" in capsys.readouterr().out


_PROGRAM = """
import torch, lowtide
from tests.test_plan_cache import _model
plan = lowtide.plan(_model(), (torch.randn(256, 16),), budget="60%", planner="greedy")
print(plan.cached, plan.peak_bytes, plan.time_ns)
"""


@pytest.mark.usefixtures("_cache")
def test_a_second_process_finds_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    first = lowtide.plan(_model(), (torch.randn(256, 16),), budget="60%", planner="greedy")
    second = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert (first.cached, second[0]) == (False, "True")
    assert second[1:] == [str(first.peak_bytes), str(first.time_ns)]
    assert main(["env"]) == 0
    assert "plan cache" in capsys.readouterr().out


@pytest.mark.usefixtures("_cache")
def test_what_is_planned_at_once_is_not_kept(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(64, 8)
    for planner, kept in (("auto{effort=0}", 0), ("auto{effort=1}", 1)):
        plans = [lowtide.plan(model, (x,), budget="100%", planner=planner) for _ in range(2)]
        assert [plan.cached for plan in plans] == [False, bool(kept)]
        assert len([*tmp_path.glob("plans/*.json")]) == kept

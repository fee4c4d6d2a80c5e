"""The plan cache: found again by the same question only, never trusted, shared by processes."""

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
from lowtide import plan_cache
from lowtide.cli.main import main
from lowtide.ir import Schedule, keep_all_schedule, schedule_to_json, simulate
from lowtide.ir.serial import dag_from_json
from lowtide.plan_cache import Question
from lowtide.planning import Plan, make_plan
from tests.support.chains import chain_dag

GRAPH, COSTS = dag_from_json(chain_dag())
PEAK = simulate(GRAPH, COSTS, keep_all_schedule(GRAPH)).peak_bytes
QUESTION = Question(GRAPH, COSTS, PEAK * 7 // 10, "greedy", 0, ("torch 2",))


def _solved(question: Question = QUESTION) -> Plan:
    return make_plan(question.graph, question.costs, budget=question.budget_bytes, planner=question.planner)


def _entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_kept_plan_comes_back(tmp_path: Path) -> None:
    plan = _solved()
    assert plan_cache.load(tmp_path / "new", QUESTION) is None
    plan_cache.store(tmp_path / "new", QUESTION, plan)
    kept = plan_cache.load(tmp_path / "new", QUESTION)
    assert kept is not None and kept.cached and not plan.cached
    for field in dataclasses.fields(Plan):
        if field.name != "cached":
            assert getattr(kept, field.name) == getattr(plan, field.name), field.name


def _other_graph(question: Question) -> Question:
    first, *others = question.graph.ops
    renamed = dataclasses.replace(first, target="another")
    return dataclasses.replace(question, graph=dataclasses.replace(question.graph, ops=(renamed, *others)))


def _other_column(name: str) -> Callable[[Question], Question]:
    def change(question: Question) -> Question:
        column: Any = np.array(getattr(question.costs, name))
        column[-1] += 1
        return dataclasses.replace(question, costs=dataclasses.replace(question.costs, **{name: column}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _other_graph,
        _other_column("time_ns"),
        _other_column("workspace_bytes"),
        _other_column("storage_bytes"),
        lambda question: dataclasses.replace(question, costs=dataclasses.replace(question.costs, rng_state_bytes=1)),
        lambda question: dataclasses.replace(question, costs=dataclasses.replace(question.costs, device="another")),
        lambda question: dataclasses.replace(question, budget_bytes=question.budget_bytes - 1),
        lambda question: dataclasses.replace(question, planner="greedy{sweep=false}"),
        lambda question: dataclasses.replace(question, seed=1),
        lambda question: dataclasses.replace(question, versions=("torch 3",)),
    ],
)
def test_another_question_has_another_key(change: Callable[[Question], Question], tmp_path: Path) -> None:
    assert change(QUESTION).key != QUESTION.key
    plan_cache.store(tmp_path, QUESTION, _solved())
    assert plan_cache.load(tmp_path, change(QUESTION)) is None


def test_places_in_the_users_files_do_not_matter() -> None:
    moved = tuple(dataclasses.replace(op, source="model.py:7", module="block.1") for op in GRAPH.ops)
    assert dataclasses.replace(QUESTION, graph=dataclasses.replace(GRAPH, ops=moved)).key == QUESTION.key


def _damaged(data: dict[str, Any]) -> list[str]:
    steps = data["answer"]["schedule"]["steps"]
    return [
        "",
        "{",
        "[1, 2]",
        "\udc80",
        json.dumps(data | {"format": "lowtide-cached-plan/0"}),
        json.dumps({key: value for key, value in data.items() if key != "answer"}),
        json.dumps(data | {"answer": 7}),
        json.dumps(data | {"answer": data["answer"] | {"lower_bound_ns": 1}}),
        json.dumps(data)[:-20],
        *map(json.dumps, map(_signed, ({}, {"schedule": []}, {"schedule": None, "lower_bound_ns": None}))),
        json.dumps(_signed(data["answer"] | {"schedule": data["answer"]["schedule"] | {"steps": steps[1:]}})),
        json.dumps(_signed(data["answer"] | {"schedule": schedule_to_json(keep_all_schedule(GRAPH))})),
        json.dumps(_signed(data["answer"] | {"schedule": schedule_to_json(Schedule((), 0))})),
    ]


def _signed(answer: dict[str, Any]) -> dict[str, Any]:
    return {"format": plan_cache.FORMAT, "sha256": plan_cache._digest(answer), "answer": answer}


def test_damaged_entries_are_ignored_and_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_cache.store(tmp_path, QUESTION, _solved())
    path = _entry(tmp_path)
    for text in _damaged(json.loads(path.read_text())):
        caplog.clear()
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with caplog.at_level(logging.WARNING):
            assert plan_cache.load(tmp_path, QUESTION) is None, text
        assert str(path) in caplog.text
        plan_cache.store(tmp_path, QUESTION, _solved())
        assert plan_cache.load(tmp_path, QUESTION) is not None
        assert _entry(tmp_path) == path


def test_concurrent_writers_and_readers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    questions = [dataclasses.replace(QUESTION, seed=seed) for seed in range(3)]
    plan = _solved()

    def work(turn: int) -> None:
        question = questions[turn % len(questions)]
        plan_cache.store(tmp_path, question, plan)
        kept = plan_cache.load(tmp_path, question)
        assert kept is not None and kept.schedule == plan.schedule

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(120)))
    assert not caplog.records
    assert len(list(tmp_path.iterdir())) == len(questions)


def test_the_entries_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_ENTRIES", 3)
    plan = _solved()
    questions = [dataclasses.replace(QUESTION, seed=seed) for seed in range(4)]
    for age, question in enumerate(questions[:3]):
        plan_cache.store(tmp_path, question, plan)
        os.utime(tmp_path / f"{question.key[:40]}.json", (age, age))
    assert plan_cache.load(tmp_path, questions[0]) is not None
    plan_cache.store(tmp_path, questions[3], plan)
    kept = [plan_cache.load(tmp_path, question) is not None for question in questions]
    assert kept == [True, False, True, True]


def test_a_folder_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        plan_cache.store(tmp_path / "file" / "below", QUESTION, _solved())
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
    runs = [
        subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert [run[0] for run in runs] == ["False", "True"]
    assert runs[0][1:] == runs[1][1:]
    assert main(["env"]) == 0
    assert "plan cache" in capsys.readouterr().out

"""Plans that get better while training runs: the same bits, inside the budget at every step, and an end to every search."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import pipeline
from lowtide.api import runtime_of
from lowtide.planning import Plan, background, make_plan, worker
from lowtide.planning.cache import PlanRequest
from lowtide.runtime.programs.entry import Siblings
from lowtide.sharing import Member
from lowtide.solve import minimum
from tests.support.networks import WithLoss, residual_blocks, rows
from tests.support.random_graphs import random_graph
from tests.support.records import assert_same_records, run_training, scalar_loss, training_step
from tests.support.training import copy_inputs, make
from tests.support.wide import is_wide

BUDGET = "50%"
STEP = training_step(scalar_loss)


@pytest.fixture(autouse=True, scope="module")
def brief_searches() -> None:
    """Searches that go on."""


def _network(blocks: int = 5) -> nn.Module:
    """With dropout, and so many operators that the first plan is not the best."""

    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32))

    return WithLoss(nn.Sequential(residual_blocks(inner, blocks), nn.Linear(32, 8)))


def _prepared(blocks: int = 5, **options: Any) -> nn.Module:
    args, kwargs = copy_inputs(rows()(0))
    return lowtide.rematerialize(make(lambda: _network(blocks)), args, kwargs, budget=BUDGET, **options)


def _long_searched() -> nn.Module:
    """A model of some 350 operators, which are searched for seconds."""
    return _prepared(12)


def _searching(model: nn.Module) -> Any:
    runtime = runtime_of(model)
    assert runtime is not None
    return runtime.improving._search


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_step_is_as_eager_and_within_the_budget_while_plans_change() -> None:
    steps = 40 if is_wide() else 16
    expected = run_training(make(_network), rows(), STEP, steps)
    model = _prepared()
    plans: list[Plan] = []
    peaks: list[int] = []
    assert _searching(model) is not None

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(peaks) == steps - 6:
            assert lowtide.wait(model, 120)
        outputs: list[Any] = []
        peaks.append(lowtide.measure(lambda: outputs.append(STEP(model, args, kwargs))).peak_bytes)
        plans.append(lowtide.plans(model)[0])
        return outputs[0]

    assert_same_records(run_training(model, rows(), step, steps), expected)
    assert all(peak == plan.peak_bytes <= plan.budget_bytes for peak, plan in zip(peaks, plans, strict=True))


def test_compiled_steps_are_those_of_the_last_plan_while_plans_change() -> None:
    """Kernels are fixed before a plan is made, so results do not depend on it."""
    steps = 12
    expected = run_training(_prepared(compiler="inductor", planning="wait"), rows(), STEP, steps)
    model = _prepared(compiler="inductor")
    (first,) = lowtide.plans(model)
    assert _searching(model) is not None

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (plan,) = lowtide.plans(model)
        outputs: list[Any] = []
        assert lowtide.measure(lambda: outputs.append(STEP(model, args, kwargs))).peak_bytes <= plan.budget_bytes
        if plan is first:
            assert lowtide.wait(model, 120)
        return outputs[0]

    assert_same_records(run_training(model, rows(), step, steps), expected)
    (last,) = lowtide.plans(model)
    assert last.graph is first.graph and last.time_ns <= first.time_ns and last.planner != first.planner


def test_a_gradient_of_another_layout_is_planned_by_the_schedule_there_is() -> None:
    """Without a search, which may need more than the budget that the first program met."""

    def network() -> nn.Module:
        return _network().body

    step = training_step(lambda output: output.sum())  # whose gradient is one number, expanded
    expected = run_training(make(network), rows(), step, 1)
    args, kwargs = copy_inputs(rows()(0))
    model = lowtide.rematerialize(make(network), args, kwargs, budget=BUDGET)
    (before,) = lowtide.plans(model)
    assert_same_records(run_training(model, rows(), step, 1), expected)
    (after,) = lowtide.plans(model)  # what is found since is in force from the next call on
    assert after.graph is not before.graph and after.planner == "adapted"
    assert after.schedule == before.schedule


def test_the_search_ends_with_what_waiting_finds() -> None:
    """And ``history`` tells how it came to that."""
    model = _prepared()
    (first,) = lowtide.plans(model)
    assert lowtide.wait(model)
    (last,) = lowtide.plans(model)
    waited = PlanRequest(last.graph, last.costs, last.budget_bytes, "auto", 0).make()
    assert (last.planner, last.lower_bound_ns) == (waited.planner, waited.lower_bound_ns)
    assert last.time_ns == min(waited.time_ns, first.time_ns)
    assert [one.time_ns for one in last.history] == sorted((one.time_ns for one in last.history), reverse=True)
    assert last.history[0].time_ns == first.time_ns
    assert last.history[-1].time_ns == last.time_ns


def test_a_step_that_has_begun_ends_under_its_plan() -> None:
    """The exchange comes between a forward pass and its backward pass."""
    model, eager = _prepared(), make(_network)
    args, kwargs = rows()(0)
    torch.manual_seed(5)
    expected = eager(*args, **kwargs)
    torch.manual_seed(5)
    loss = model(*args, **kwargs)
    assert lowtide.wait(model, 120)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("how", ["restore", "collected"])
def test_the_search_ends_with_its_model(how: str) -> None:
    model = _long_searched()
    process = _searching(model)._listener.process.pid
    assert _is_alive(process)
    if how == "restore":
        lowtide.restore(model)
    else:
        del model
        gc.collect()
    assert not _is_alive(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_search_ends_with_the_process(number: signal.Signals) -> None:
    """However that ends."""
    code = (
        "import sys, time; from tests.runtime.test_background import _long_searched, _searching; model = _long_searched(); "
        "print(_searching(model)._listener.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        process = int(started.stdout.readline())
        started.send_signal(number)
    deadline = time.monotonic() + 60
    while _is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_alive(process)


def _ended_while_it_prepares(*lines: str) -> str:
    """What a process says that ends well while a plan is prepared, which these lines do there."""
    code = (
        "import os, signal, threading, time, torch\n"
        "from tests.runtime.test_background import _long_searched, _searching\n"
        "began, model = threading.Event(), _long_searched()\n"
        "def prepare(plan):\n"
        "    began.set()\n"
        + "".join(f"    {line}\n" for line in lines)
        + "_searching(model)._listener.prepare = prepare\n"
        "assert began.wait(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_a_process_that_ends_while_a_plan_is_prepared_ends_well() -> None:
    """A thread that comes back from PyTorch's code when Python is no more aborts the process."""
    _ended_while_it_prepares("for _ in range(3000): torch.ones(200, 200).sum()")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_while_a_search_is_ended_is_not_shown() -> None:
    said = _ended_while_it_prepares("time.sleep(1)", "os.kill(os.getpid(), signal.SIGINT)", "time.sleep(0.5)")
    assert "KeyboardInterrupt" not in said


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('out of luck')", "out of luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "code -11"),
        ('print(\'{"plan": {}, "done": true}\')', "not sound"),
        ('print(\'{"error": "MemoryError: none left"}\')', "MemoryError: none left"),
        ("print('nonsense')", "malformed"),
    ],
    ids=["exit", "crash", "no plan", "error", "nonsense"],
)
def test_a_search_that_fails_is_said_and_changes_nothing(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(background.subprocess, "Popen", lambda args, **how: start([sys.executable, "-c", code], **how))
    model = _prepared()
    (plan,) = lowtide.plans(model)
    assert lowtide.wait(model, 60)
    assert said in caplog.text
    assert "The plan in force stays" in caplog.text
    assert lowtide.plans(model) == [plan]
    expected = run_training(make(_network), rows(), STEP, 2)
    assert_same_records(run_training(model, rows(), STEP, 2), expected)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    model = _prepared()
    assert lowtide.wait(model, 1)
    assert "no search for a better plan can be started" in caplog.text
    STEP(model, *copy_inputs(rows()(0)))


def test_a_known_plan_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process keeps what it finds for the next start."""
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "1")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    model = _prepared()
    assert lowtide.wait(model, 120)
    (found,) = lowtide.plans(model)
    again = _prepared()
    assert _searching(again) is None
    (plan,) = lowtide.plans(again)
    assert plan.cached
    assert plan.time_ns == found.time_ns


def test_a_budget_that_only_the_search_meets_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """And one that none meets is refused with the numbers of the whole search."""
    args, kwargs = copy_inputs(rows()(0))
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.rematerialize(make(lambda: _network(2)), args, kwargs, budget=1)
    with pytest.raises(lowtide.InfeasibleBudgetError) as waited:
        lowtide.rematerialize(make(lambda: _network(2)), args, kwargs, budget=1, planning="wait")
    assert refused.value.minimum_bytes == waited.value.minimum_bytes
    model = lowtide.rematerialize(make(lambda: _network(2)), args, kwargs, budget=refused.value.minimum_bytes)
    (plan,) = lowtide.plans(model)
    assert plan.peak_bytes <= refused.value.minimum_bytes
    lowtide.restore(model)


def test_a_plan_of_the_quick_search_gets_better_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pipeline, "FIRST_PLANNER", pipeline.QUICK_SEARCH
    )  # as where the one at once meets no such budget
    model = _prepared()
    assert _searching(model) is not None
    (first,) = lowtide.plans(model)
    assert first.planner == pipeline.QUICK_SEARCH
    assert lowtide.wait(model, 120)
    (found,) = lowtide.plans(model)
    assert found.time_ns <= first.time_ns


def test_the_least_budget_that_is_named_is_met_though_a_first_plan_misses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches this short often miss what another of them meets; a plan at once has one alone."""
    monkeypatch.setattr(minimum, "_answers", {})
    monkeypatch.setattr(minimum, "_ROUNDS", 1)
    monkeypatch.setattr(minimum, "_ROUND", 100)
    monkeypatch.setattr(pipeline, "_FEW_OPS", 1)
    missed = 0
    for seed in range(8):
        graph, costs = random_graph(seed, 60)
        with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
            make_plan(graph, costs, budget=1)
        least = refused.value.minimum_bytes
        first = pipeline._first_plan(PlanRequest(graph, costs, least, "auto", 0))
        assert first is not None and first.peak_bytes <= least
        missed += first.planner == "auto{effort=1}"  # by which training begins, too
    assert missed


def test_arguments() -> None:
    with pytest.raises(lowtide.PlanError, match="planning='later' is unknown"):
        _prepared(planning="later")
    with pytest.raises(lowtide.PlanError, match="not rematerialized"):
        lowtide.wait(make(_network))
    planned = lowtide.rematerialize(make(_network), budget="60%")
    for seconds in ("5", float("nan")):
        with pytest.raises(lowtide.PlanError, match="seconds is"):
            lowtide.wait(planned, seconds)  # type: ignore[arg-type]


def test_plans_on_the_way_are_few_and_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process writes: each better by enough than the one before and sound, the last the planner's answer."""
    monkeypatch.setattr(worker, "_LEAST_SECONDS", 0.0)
    (plan,) = lowtide.plans(_prepared(planner="greedy"))
    request, output = PlanRequest(plan.graph, plan.costs, plan.budget_bytes, "auto", 0), io.BytesIO()
    worker.search(request, plan.time_ns, output, os.getppid())
    *ways, answer = map(json.loads, output.getvalue().splitlines())
    assert answer["done"]
    times = [Plan.from_json(one["plan"], plan.graph, plan.costs).time_ns for one in (*ways, answer)]
    assert all(
        later <= (1 - worker._LEAST_GAIN) * sooner for sooner, later in itertools.pairwise([plan.time_ns, *times[:-1]])
    )
    assert times[-1] == min(times) == request.make().time_ns


def test_a_search_ends_where_the_process_that_asked_went_before_it_began() -> None:
    """An interpreter that starts on a busy machine takes longer than a short script."""
    (plan,) = lowtide.plans(_prepared(planner="greedy"))
    request, output = PlanRequest(plan.graph, plan.costs, plan.budget_bytes, "auto", 0), io.BytesIO()
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with pytest.raises(SystemExit):
        worker.search(request, plan.time_ns, output, int(ended.stdout))
    assert b"done" not in output.getvalue()


@pytest.mark.parametrize("waits", [False, True])
def test_a_schedule_of_a_sibling_is_taken_over_where_it_is_quicker(waits: bool) -> None:
    """But for one that saves more, where others run meanwhile."""
    slow, quick = _prepared(planner="chen-sqrt"), _prepared(planner="auto", planning="wait")
    (entries,), (found,) = ((*runtime_of(each).entries.values(),) for each in (slow, quick))
    entry, best = entries[0], found[0].plan
    siblings, before = Siblings(), entry.plan
    siblings.keep(found[0])
    siblings.take_over(entry, waits=waits)
    member = Member(entry.program, before.costs)
    saves_more = member.footprint(best.schedule).saved_bytes > member.footprint(before.schedule).saved_bytes
    assert best.time_ns < before.time_ns and entry.version == siblings.version
    assert entry.plan.schedule == (before if waits and saves_more else best).schedule
    expected = run_training(make(_network), rows(), STEP, 2)
    assert_same_records(run_training(slow, rows(), STEP, 2), expected)

"""A pass that runs out of memory by its plan runs again by a lower one: the same bits, nothing twice, and never in silence."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import runtime_of
from lowtide.lower import gradient_groups
from lowtide.memory import cpu_allocator
from tests.support.networks import WithLoss, residual_blocks, rows
from tests.support.records import assert_same_records, run_training, scalar_loss
from tests.support.scarce import QUICK, Scarce, drawing_body, drawing_network, memory_of, plan_of, prepared
from tests.support.training import make
from tests.support.wide import pairs

_LOWERED = "ran out of memory in its"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of small networks leave in several groups, as those of large ones do."""
    monkeypatch.setattr(gradient_groups, "_LEAST_BYTES", 1)


def _level() -> int:
    gc.collect()
    counter = cpu_allocator.install()
    assert counter is not None
    return counter.level_bytes


def _notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize(("where", "factory"), pairs(("forward", "backward", "left"), (drawing_network, drawing_body)))
def test_steps_are_eagers_to_the_bit(where: str, factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Results, gradients, buffers and the generator, in that step and those after it; and the log says what was done."""
    expected = run_training(make(factory), rows(), Scarce(where), 5)
    model = prepared(factory)
    before = plan_of(model)
    with caplog.at_level(logging.WARNING):
        records = run_training(model, rows(), Scarce(where), 5)
    assert_same_records(records, expected)
    after = plan_of(model)
    assert after.peak_bytes <= after.budget_bytes < before.peak_bytes
    assert after.lowered_from_bytes == before.budget_bytes
    said = [record.getMessage() for record in caplog.records if _LOWERED in record.getMessage()]
    assert len(said) == 1 or where == "left"  # where less is left than the pass had, one rescue tells how much
    assert f"its {'forward' if where == 'forward' else 'backward'} pass" in said[0]
    assert f"instead of {before.budget_bytes} " in said[0]
    assert f"is {after.budget_bytes} bytes" in said[-1] and f"overhead {100 * after.overhead:.1f} %" in said[-1]
    assert "budget lowered" in str(after) and "budget lowered" not in str(before)


@pytest.mark.parametrize("where", ["forward", "backward", "left"])
def test_gradients_are_added_once(where: str) -> None:
    """To those of another pass."""

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scalar_loss(model(*args, **kwargs)).backward()
        return Scarce(where, 0)(model, args, kwargs)

    expected = run_training(make(drawing_body), rows(), step, 1)
    model = prepared(drawing_body)
    assert_same_records(run_training(model, rows(), step, 1), expected)
    assert plan_of(model).lowered_from_bytes


def test_every_gradient_leaves_once() -> None:
    """Hooks see each once, with its value, though the backward program runs twice."""
    seen: dict[str, list[Any]] = {}

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handles = [
            parameter.register_hook(
                lambda gradient, name=name: seen.setdefault(name, []).append(gradient.numpy().copy())
            )
            for name, parameter in model.named_parameters()
        ]
        output = Scarce("left", 0)(model, args, kwargs)
        for handle in handles:
            handle.remove()
        return output

    expected = run_training(make(drawing_network), rows(), step, 1)
    once, seen = seen, {}
    model = prepared()
    assert_same_records(run_training(model, rows(), step, 1), expected)
    assert plan_of(model).lowered_from_bytes
    assert all(
        np.array_equal(theirs, ours) for name in once for theirs, ours in zip(once[name], seen[name], strict=True)
    )


@pytest.mark.parametrize("groups", [(16, 3), (3, 16)])
def test_groups_of_gradients_may_be_others(groups: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan that the pass ends by, beside the one that it began by."""
    expected = run_training(make(drawing_network), rows(), Scarce("left", 0), 2)
    monkeypatch.setattr(gradient_groups, "_MOST_GROUPS", groups[0])
    model = prepared()
    monkeypatch.setattr(gradient_groups, "_MOST_GROUPS", groups[1])
    assert_same_records(run_training(model, rows(), Scarce("left", 0), 2), expected)
    assert plan_of(model).lowered_from_bytes


def test_gradients_that_left_are_in_the_way_of_that_pass_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Of large layers on few rows: where most gradients are there already, the pass has less than the next one will have."""

    def layers() -> nn.Module:
        return WithLoss(
            nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(96, 96), nn.GELU(), nn.GELU())))
        )

    inputs, step = rows(256, 96), Scarce("left")
    expected = run_training(make(layers), inputs, step, 4)
    model = lowtide.rematerialize(make(layers), *inputs(0), budget="85%", planner=QUICK)
    before = plan_of(model)
    step.calls = 0
    with caplog.at_level(logging.WARNING):
        assert_same_records(run_training(model, inputs, step, 4), expected)
    after = plan_of(model)
    said = [message for message in caplog.messages if _LOWERED in message]
    found = [re.search(r"(\d+) bytes \(.*?\) of the (\d+) of its plan were missing", one) for one in said]
    assert found[0] is not None and int(found[0][2]) == before.peak_bytes
    assert found[-1] is not None  # a lower plan may run out once more
    room = int(found[-1][2]) - int(found[-1][1])
    left = sum(p.numel() * 4 for p in list(model.parameters())[12:])
    assert room < after.budget_bytes <= room + left


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_rescue_it_is_the_original_error(where: str) -> None:
    model = prepared(rescue=False, planning="wait")
    before = plan_of(model)
    args, kwargs = rows()(0)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        Scarce(where, 0)(model, args, kwargs)
    assert not _notes(raised.value)
    assert plan_of(model) is before
    with pytest.raises(lowtide.PlanError, match="rescue='no'"):
        lowtide.rematerialize(make(drawing_network), budget="80%", rescue="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_third_in_a_row_says_what_takes_the_memory(where: str) -> None:
    """Until a step comes to its end; what the attempts held is given back."""
    model = prepared(budget="100%")
    args, kwargs = rows()(0)
    level = _level()
    for _ in range(2):
        Scarce(where, 0, 0.8)(model, args, kwargs)
        model.zero_grad()
    lowered = plan_of(model)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        Scarce(where, 0, 0.8)(model, args, kwargs)
    (note,) = raised.value.__notes__
    assert "memory ran out in 3 steps in a row" in note and f"takes {lowered.peak_bytes} bytes" in note
    held = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    assert f"parameters and buffers {held / 1024:.1f} KiB" in note
    assert re.search(r"gradients .*; states of optimizers [^;]*; inputs of the call 32.0 KiB", note)
    del raised
    assert _level() <= level
    assert plan_of(model) is lowered
    scalar_loss(model(*args, **kwargs)).backward()  # a step without
    Scarce(where, 0, 0.9)(model, args, kwargs)
    assert plan_of(model).budget_bytes < lowered.budget_bytes


def test_below_the_least_budget_it_says_so() -> None:
    model = make(drawing_network)
    args, kwargs = rows()(0)
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.rematerialize(model, args, kwargs, budget=1, planner=QUICK)
    least = refused.value.minimum_bytes
    lowtide.rematerialize(model, args, kwargs, budget="100%", planner=QUICK)
    with pytest.raises(RuntimeError, match="can't allocate") as raised:
        Scarce("forward", 0, 0.1)(model, args, kwargs)
    assert plan_of(model).budget_bytes == least
    assert "the least that is known to be possible" in _notes(raised.value)


def test_a_second_backward_pass_and_one_to_some() -> None:
    """Both run the forward pass again, which runs out."""

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = model(*args, **kwargs)
        first = next(iter(model.parameters()))
        torch.autograd.grad(output, first, retain_graph=True)
        with memory_of(plan.budget_bytes // 2) if runtime_of(model) else contextlib.nullcontext():
            output.backward()
        return output

    expected = run_training(make(drawing_network), rows(), step, 2)
    model = prepared()
    plan = plan_of(model)
    assert_same_records(run_training(model, rows(), step, 2), expected)
    assert plan_of(model).lowered_from_bytes


def test_the_budget_is_lowered_for_all_shapes() -> None:
    """Those planned before, and those to come; a copy of the model starts from it."""
    model = prepared(planning="wait")
    short, long = rows(192), rows(320)
    scalar_loss(model(*short(0)[0])).backward()
    args, kwargs = rows()(1)
    Scarce("forward", 0, 0.7)(model, args, kwargs)
    most = lowtide.plans(model)[0].budget_bytes
    clone = copy.deepcopy(model)
    for inputs in (short, long):
        args, _ = inputs(1)
        model.zero_grad()
        assert lowtide.measure(lambda given: model(*given).backward(), args).peak_bytes <= most
    assert [plan.budget_bytes for plan in lowtide.plans(model)] == [most] * 3
    model(*rows(1024)(0)[0]).backward()  # which cannot do with so little
    largest = lowtide.plans(model)[-1]
    assert most < largest.peak_bytes <= largest.budget_bytes < 0.6 * largest.unconstrained_peak_bytes
    scalar_loss(clone(*long(0)[0])).backward()
    assert plan_of(clone).budget_bytes == most
    elsewhere = pickle.loads(pickle.dumps(clone))
    scalar_loss(elsewhere(*long(0)[0])).backward()
    assert plan_of(elsewhere).budget_bytes > most


def test_the_search_goes_on_within_the_lower_budget() -> None:
    def deep() -> nn.Module:
        block = residual_blocks(
            lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)), 12
        )
        return WithLoss(nn.Sequential(block, nn.Linear(32, 8)))

    step = Scarce("forward")
    expected = run_training(make(deep), rows(), step, 4)
    step.calls = 0
    model = prepared(deep, budget="60%", planner="auto{effort=2}")
    assert_same_records(run_training(model, rows(), step, 4), expected)
    lowered = plan_of(model).budget_bytes
    assert lowtide.wait(model, 120)
    last = plan_of(model)
    assert last.planner == "auto{effort=2}" and last.peak_bytes <= last.budget_bytes == lowered
    assert last.lowered_from_bytes


def test_what_is_moved_away_is_let_go(tmp_path: Path) -> None:
    """By the pass that fails, and moved anew by the one that runs again."""
    expected = run_training(make(drawing_network), rows(), Scarce("backward"), 3)
    options = {"budget": "50%", "planner": "offload{effort=0}", "offload": f"disk:{tmp_path}"}
    model = lowtide.rematerialize(make(drawing_network), *rows()(0), **options)  # type: ignore[arg-type]
    assert plan_of(model).schedule.moves
    assert_same_records(run_training(model, rows(), Scarce("backward"), 3), expected)
    assert plan_of(model).lowered_from_bytes


def test_an_arena_gives_way_to_a_smaller_one() -> None:
    expected = run_training(make(drawing_network), rows(), Scarce("forward", 2, 0.7), 5)
    model = prepared(arena=True)
    records = run_training(model, rows(), Scarce("forward", 2, 0.7), 5)
    assert_same_records(records, expected)
    runtime = runtime_of(model)
    assert runtime is not None
    ((arena,), plan) = runtime._arenas.values(), plan_of(model)
    assert plan.lowered_from_bytes and arena is not None
    assert arena.reserved_bytes <= plan.budget_bytes


def test_a_lower_plan_of_other_sizes_is_kept() -> None:
    """Where it fits into what memory sufficed for, too: for no more than that from then on."""
    sizes = (64, 16, 64, 16, 64)

    def inputs(iteration: int) -> Any:
        return rows(sizes[iteration])(iteration)

    expected = run_training(make(drawing_network), inputs, Scarce("forward", 2), len(sizes))
    plain = lowtide.plan(make(drawing_network), *inputs(0), budget="100%", planner=QUICK)
    model = lowtide.rematerialize(make(drawing_network), budget=plain.peak_bytes, planner=QUICK, dynamic=False)
    assert_same_records(run_training(model, inputs, Scarce("forward", 2), len(sizes)), expected)
    large, small = sorted(lowtide.plans(model), key=lambda plan: -plan.peak_bytes)
    assert small.peak_bytes < large.peak_bytes <= large.budget_bytes == small.budget_bytes < plain.peak_bytes
    assert small.lowered_from_bytes == large.lowered_from_bytes == plain.peak_bytes

"""A pass that runs out of memory by its plan runs again by a lower one: the same bits, nothing twice, and never in silence."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import runtime_of
from lowtide.memory import cpu_allocator
from tests.support.networks import WithLoss, residual_blocks, rows
from tests.support.records import assert_same_records, run_training, scalar_loss
from tests.support.scarce import memory_of
from tests.support.training import copy_inputs, make

QUICK = "auto{effort=1}"
_LOWERED = "ran out of memory in its"


def _body() -> nn.Sequential:
    """Draws random numbers, and updates buffers."""
    return nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2)))
    )


def _network() -> nn.Module:
    return WithLoss(_body())


def _prepared(factory: Callable[[], nn.Module] = _network, budget: int | str = "80%", **options: Any) -> nn.Module:
    args, kwargs = copy_inputs(rows()(0))
    return lowtide.rematerialize(make(factory), args, kwargs, **{"budget": budget, "planner": QUICK, **options})


def _plan(model: nn.Module) -> lowtide.Plan:
    (plan,) = lowtide.plans(model)
    return plan


def _level() -> int:
    gc.collect()
    counter = cpu_allocator.install()
    assert counter is not None
    return counter.level_bytes


def _notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


class Scarce:
    """A training step in whose ``number``-th call, of a planned model, memory runs out: in the forward pass, for which there is
    a ``share`` of the plan's peak; or in the backward pass, before a gradient has left, or after some have (``where``)."""

    def __init__(self, where: str, number: int = 1, share: float = 0.6) -> None:
        self.where, self.number, self.share = where, number, share
        self.calls = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned = runtime_of(model) is not None
        where, self.calls = self.where if planned and self.calls == self.number else "", self.calls + 1
        with contextlib.ExitStack() as ends:  # after the step
            if where == "forward":
                ends.enter_context(memory_of(int(self.share * max(plan.peak_bytes for plan in lowtide.plans(model)))))
            if where == "left":
                parameters = list(model.parameters())
                late = parameters[3 * len(parameters) // 4]
                hook = late.register_post_accumulate_grad_hook(lambda _: _enter(ends, memory_of(-64 << 10)))
                ends.callback(hook.remove)
            output = model(*args, **kwargs)
            if where == "backward":
                output.register_hook(lambda _: _enter(ends, memory_of(512)))
            scalar_loss(output).backward()
        return output


def _enter(ends: contextlib.ExitStack, limit: contextlib.AbstractContextManager[None]) -> None:
    ends.enter_context(limit)


@pytest.mark.parametrize("factory", [_network, _body])
@pytest.mark.parametrize("where", ["forward", "backward", "left"])
def test_steps_are_eagers_to_the_bit(where: str, factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Results, gradients, buffers and the generator, in that step and those after it; and the log says what was done."""
    expected = run_training(make(factory), rows(), Scarce(where), 5)
    model = _prepared(factory)
    before = _plan(model)
    with caplog.at_level(logging.WARNING):
        records = run_training(model, rows(), Scarce(where), 5)
    assert_same_records(records, expected)
    after = _plan(model)
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

    expected = run_training(make(_body), rows(), step, 1)
    model = _prepared(_body)
    assert_same_records(run_training(model, rows(), step, 1), expected)
    assert _plan(model).lowered_from_bytes


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

    expected = run_training(make(_network), rows(), step, 1)
    once, seen = seen, {}
    model = _prepared()
    assert_same_records(run_training(model, rows(), step, 1), expected)
    assert _plan(model).lowered_from_bytes
    assert all(
        np.array_equal(theirs, ours) for name in once for theirs, ours in zip(once[name], seen[name], strict=True)
    )


def test_gradients_that_left_are_in_the_way_of_that_pass_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Of large layers on few rows: where most gradients are there already, the pass has less than the next one will have."""

    def layers() -> nn.Module:
        return WithLoss(
            nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(96, 96), nn.GELU(), nn.GELU())))
        )

    inputs, step = rows(256, 96), Scarce("left")
    expected = run_training(make(layers), inputs, step, 4)
    model = lowtide.rematerialize(make(layers), *inputs(0), budget="85%", planner=QUICK)
    before = _plan(model)
    step.calls = 0
    with caplog.at_level(logging.WARNING):
        assert_same_records(run_training(model, inputs, step, 4), expected)
    after = _plan(model)
    said = next(message for message in caplog.messages if _LOWERED in message)
    missing = re.search(r"(\d+) bytes \(.*?\) of the (\d+) of its plan were missing", said)
    assert missing is not None and int(missing[2]) == before.peak_bytes
    room = before.peak_bytes - int(missing[1])
    left = sum(p.numel() * 4 for p in list(model.parameters())[12:])
    assert room < after.budget_bytes <= room + left


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_rescue_it_is_the_original_error(where: str) -> None:
    model = _prepared(rescue=False)
    before = _plan(model)
    args, kwargs = rows()(0)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        Scarce(where, 0)(model, args, kwargs)
    assert not _notes(raised.value)
    assert _plan(model) is before
    with pytest.raises(lowtide.PlanError, match="rescue='no'"):
        lowtide.rematerialize(make(_network), budget="80%", rescue="no")  # type: ignore[arg-type]


def test_the_third_in_a_row_says_what_takes_the_memory() -> None:
    """Until a step comes to its end; what the attempts held is given back."""
    model, eager = _prepared(budget="100%"), make(_network)
    args, kwargs = rows()(0)
    level = _level()
    for share in (0.8, 0.8):
        Scarce("forward", 0, share)(model, args, kwargs)
    lowered = _plan(model)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        Scarce("forward", 0, 0.8)(model, args, kwargs)
    note = _notes(raised.value)
    assert "third time in a row" in note and f"takes {lowered.peak_bytes} bytes" in note
    held = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    assert f"parameters and buffers {held / 1024:.1f} KiB" in note
    assert re.search(r"gradients .* KiB .*; states of optimizers nothing; inputs of the call 32.0 KiB", note)
    del raised
    model.zero_grad()
    assert _level() <= level
    assert _plan(model) is lowered
    scalar_loss(model(*args, **kwargs)).backward()  # a step without
    Scarce("forward", 0, 0.9)(model, args, kwargs)
    assert _plan(model).budget_bytes < lowered.budget_bytes
    del eager


def test_below_the_least_budget_it_says_so() -> None:
    model = make(_network)
    args, kwargs = rows()(0)
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        lowtide.rematerialize(model, args, kwargs, budget=1, planner=QUICK)
    least = refused.value.minimum_bytes
    lowtide.rematerialize(model, args, kwargs, budget="100%", planner=QUICK)
    with pytest.raises(RuntimeError, match="can't allocate") as raised:
        Scarce("forward", 0, 0.1)(model, args, kwargs)
    assert _plan(model).budget_bytes == least
    assert "the least that is known to be possible" in _notes(raised.value)


def test_a_second_backward_pass_and_one_to_some() -> None:
    """Both run the forward pass again, which runs out."""

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = model(*args, **kwargs)
        first = next(iter(model.parameters()))
        torch.autograd.grad(output, first, retain_graph=True)
        limit = memory_of(_plan(model).peak_bytes // 2) if runtime_of(model) else contextlib.nullcontext()
        with limit:
            output.backward()
        return output

    expected = run_training(make(_network), rows(), step, 2)
    model = _prepared()
    assert_same_records(run_training(model, rows(), step, 2), expected)
    assert _plan(model).lowered_from_bytes


def test_the_budget_is_lowered_for_all_shapes() -> None:
    """Those planned before, and those to come; a copy of the model starts from it."""
    model = _prepared(planning="wait")
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
    scalar_loss(clone(*long(0)[0])).backward()
    assert _plan(clone).budget_bytes == most
    (taken,) = lowtide.plans(pickle.loads(pickle.dumps(clone))) or (None,)
    assert taken is None


def test_the_search_goes_on_within_the_lower_budget() -> None:
    def deep() -> nn.Module:
        block = residual_blocks(
            lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)), 12
        )
        return WithLoss(nn.Sequential(block, nn.Linear(32, 8)))

    step = Scarce("forward")
    expected = run_training(make(deep), rows(), step, 4)
    step.calls = 0
    model = _prepared(deep, budget="60%", planner="auto{effort=2}")
    assert_same_records(run_training(model, rows(), step, 4), expected)
    lowered = _plan(model).budget_bytes
    assert lowtide.wait(model, 120)
    last = _plan(model)
    assert last.planner == "auto{effort=2}" and last.peak_bytes <= last.budget_bytes == lowered
    assert last.lowered_from_bytes


def test_an_arena_gives_way_to_a_smaller_one() -> None:
    expected = run_training(make(_network), rows(), Scarce("forward", 2, 0.7), 5)
    model = _prepared(arena=True)
    records = run_training(model, rows(), Scarce("forward", 2, 0.7), 5)
    assert_same_records(records, expected)
    runtime = runtime_of(model)
    assert runtime is not None
    ((arena,), plan) = runtime._arenas.values(), _plan(model)
    assert plan.lowered_from_bytes and arena is not None
    assert arena.reserved_bytes <= plan.budget_bytes

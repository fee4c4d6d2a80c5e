"""Where a pass that runs out of memory cannot run again: the original error with a note that says why, and nothing changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import lowtide
from lowtide.api import runtime_of
from lowtide.runtime.calls import step
from lowtide.runtime.programs import rescue
from tests.support.networks import WithLoss, perceptron, rows
from tests.support.records import assert_same_records, run_training
from tests.support.scarce import QUICK, Scarce, drawing_network, memory_of, plan_of, prepared
from tests.support.training import make

_OUT = "can't allocate memory"
_REFUSED = "cannot run again by a lower plan"
_CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
_CUDA = (
    "CUDA out of memory. Tried to allocate 1.50 MiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 MiB is free."
)


def _note(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


def _refused(run: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError, match=_OUT) as raised:
        run()
    return _note(raised.value)


def test_an_argument_that_was_modified() -> None:
    """The backward pass alone does not read it, a forward pass does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.body = nn.Parameter(torch.zeros(32)), perceptron(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.body(x + self.bias).square().mean()
            return result

    (x,), _ = rows()(0)
    model = lowtide.rematerialize(make(Net), (x,), budget="100%", planner=QUICK)
    loss = model(x)
    x.add_(1)
    before = plan_of(model)

    def backward() -> None:
        with memory_of(512):
            loss.backward()

    assert f"{_REFUSED}: argument 0 was modified" in _refused(backward)
    assert plan_of(model) is before


def test_buffers_that_have_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the forward program there is next to nothing that could fail."""

    def failing(*_: Any) -> Any:
        raise RuntimeError(_CPU)

    model = prepared()
    before = copy.deepcopy(dict(model.named_buffers()))
    args, kwargs = rows()(0)
    with monkeypatch.context() as patch:
        patch.setattr(step, "with_views", failing)
        assert "have been updated already" in _refused(lambda: model(*args, **kwargs))
    assert not torch.equal(model.body[1].running_mean, before["body.1.running_mean"])
    assert int(model.body[1].num_batches_tracked) == 1  # once


@pytest.mark.parametrize("late", [False, True])
def test_updates_of_an_optimizer(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first of them the pass runs again; afterwards forward passes would read other parameters."""

    def losses(planned: bool) -> list[float]:
        model = make(drawing_network)
        optimizer = optim.AdamW(model.parameters(), 0.01)
        if planned:
            lowtide.rematerialize(model, rows()(0)[0], budget="80%", planner=QUICK, optimizer=optimizer)
        found = []
        torch.manual_seed(3)
        for number in range(4):
            run = Scarce("backward" if number == 2 else "", 0)
            found.append(float(run(model, *rows()(number)).detach()))
            optimizer.step()
            optimizer.zero_grad()
        if planned:
            assert any(plan.lowered_from_bytes for plan in lowtide.plans(model))
        return found

    if not late:
        assert losses(True) == losses(False)
        return
    model = make(drawing_network)
    optimizer = optim.AdamW(model.parameters(), 0.01)
    lowtide.rematerialize(model, rows()(0)[0], budget="80%", planner=QUICK, optimizer=optimizer)
    runtime = runtime_of(model)
    assert runtime is not None and runtime.optimizer is not None
    (updates,) = runtime.optimizer.of
    update, count = updates.update, 0
    with contextlib.ExitStack() as ends:

        def counting(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            nonlocal count
            update(parameter, gradient)
            count += 1
            if count == 6:
                ends.enter_context(memory_of(-64 << 10))

        monkeypatch.setattr(updates, "update", counting)
        note = _refused(lambda: model(*rows()(0)[0]).backward())
    assert f"{_REFUSED}: parameters have been updated in it already" in note
    assert f"{count} parameters of WithLoss had been updated before this error" in note


def test_an_operator_with_an_effect() -> None:
    calls = [0]

    @torch.library.custom_op("lowtide_rescue::counting", mutates_args=())
    def counting(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x + calls[0]

    counting.register_fake(torch.empty_like)
    counting.register_autograd(lambda ctx, gradient: gradient)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = counting(self.body(x)).square().mean()
            return result

    model = prepared(Net)
    before = calls[0]
    args, kwargs = rows()(0)
    assert "an effect that cannot be undone" in _refused(lambda: Scarce("forward", 0)(model, args, kwargs))
    assert calls[0] <= before + 1


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would lower its plan for itself."""
    model = prepared()
    monkeypatch.setattr(rescue, "several_processes", lambda: True)
    assert "other processes run by the same plan" in _refused(lambda: Scarce("forward", 0)(model, *rows()(0)))


def test_parts() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = perceptron(4), perceptron(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            result: torch.Tensor = self.second(x if x.sum() > 0 else -x).square().mean()
            return result

    model = lowtide.rematerialize(make(Deciding), budget="100%", planner=QUICK)
    args, _ = rows()(0)
    model(*args).backward()

    def run() -> None:
        with memory_of(40 << 10):
            model(*args).backward()

    assert f"{_REFUSED}: it shares its budget with others" in _refused(run)


def test_memory_that_the_users_code_lacks_is_no_business_of_plans() -> None:
    model = prepared()
    before = plan_of(model)
    args, kwargs = rows()(0)

    def greedy(gradient: torch.Tensor) -> None:
        with memory_of(0):
            torch.empty(1000)

    next(iter(model.parameters())).register_hook(greedy)
    assert not _refused(lambda: model(*args, **kwargs).backward())
    assert plan_of(model) is before


def test_an_error_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("something else")

    model = make(lambda: WithLoss(perceptron(4)))
    lowtide.rematerialize(model, rows()(0)[0], budget="100%", planner=QUICK)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="something else") as raised:
        patch.setattr(step, "with_views", failing)
        model(*rows()(0)[0])
    assert not _note(raised.value)
    run = Scarce("")
    expected = run_training(make(lambda: WithLoss(perceptron(4))), rows(), run, 2)
    assert_same_records(run_training(model, rows(), run, 2), expected)


@pytest.mark.parametrize(
    ("error", "ran_out", "asked"),
    [
        (RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {_CPU}"), True, 4096),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."), True, 4096),
        (torch.OutOfMemoryError(_CUDA), True, 3 << 19),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 0 bytes."), True, 0),
        (
            RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {1 << 62} bytes."),
            True,
            None,
        ),
        (MemoryError("std::bad_alloc"), True, None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, None),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, None),
        (ValueError(_CPU), False, 4096),
    ],
)
def test_what_an_error_tells(error: Exception, ran_out: bool, asked: int | None) -> None:
    assert rescue.ran_out(error) is ran_out
    assert rescue._asked_bytes(error, torch.device("cpu")) == asked

"""A model that cannot be captured runs under the online mode, where that was asked for or nothing of it can be planned."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.dynamic.context import is_inside


class _Dynamic(nn.Module):
    """How many layers run depends on the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
            if inputs.mean() > 2.0:
                break
        return inputs.sum()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_runs_online_and_equal_to_eager(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, inputs = _Dynamic(), torch.randn(512, 64)
    peak = lowtide.measure(lambda: model(inputs).backward()).peak_bytes
    expected = _gradients(model)
    model.zero_grad()
    budget = peak * 6 // 10
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        lowtide.rematerialize(model, (inputs,), budget=budget, on_capture_error="online")
    try:
        measured = lowtide.measure(lambda: model(inputs).backward()).peak_bytes
        model.zero_grad()
        model(inputs).backward()
        actual = _gradients(model)
    finally:
        lowtide.restore(model)
    assert measured <= budget
    assert len(actual) == len(expected) and all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert [record.message for record in caplog.records if "lowtide.online" in record.message]
    assert torch.equal(model(inputs), _again(model, inputs))


def _again(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(inputs)
    return result


class _Plain(_Dynamic):
    """Without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(layer.weight.detach()) for layer in self.layers)
        del self.layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            inputs = torch.tanh(inputs @ weight)
            if inputs.mean() > 2.0:
                break
        return inputs.sum()


def _steps(model: nn.Module, inputs: torch.Tensor, count: int) -> list[int]:
    """Their measured peaks; gradients stay from the last."""
    peaks = []
    for _ in range(count):
        model.zero_grad()
        peaks.append(lowtide.measure(lambda: model(inputs).backward()).peak_bytes)
    return peaks


def _equal_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(_gradients(one), _gradients(other), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("make", [_Dynamic, _Plain])
@pytest.mark.parametrize("share", ["60%", "bytes", "total"])
def test_what_has_no_parts_runs_online(
    make: Callable[[], nn.Module], share: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By default: within bytes from the first step on, and within a part of the peak of the first step."""
    torch.manual_seed(0)
    plain, inputs = make(), torch.randn(512, 64)
    model = copy.deepcopy(plain)
    (peak,) = _steps(plain, inputs, 1)
    state = sum(each.numel() * each.element_size() for each in model.parameters())
    budget: dict[str, Any] = {
        "60%": {"budget": "60%"},
        "bytes": {"budget": peak * 6 // 10},
        "total": {"total_budget": peak * 6 // 10 + 3 * state},
    }[share]
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        lowtide.rematerialize(model, **budget)
        try:
            first, *peaks = _steps(model, inputs, 4)
            equal = _equal_gradients(model, plain)
        finally:
            lowtide.restore(model)
    assert max(peaks) <= peak * 6 // 10 and (share == "60%" or first <= peak * 6 // 10)
    assert equal and len([1 for record in caplog.records if "runs under lowtide.online" in record.message]) == 1
    assert torch.equal(model(inputs), plain(inputs))


def _peaks(model: nn.Module, plain: nn.Module, rows: list[int]) -> list[float]:
    """Of steps with so many rows each, as shares of plain ones with the same gradients."""
    shares = []
    for number in rows:
        inputs = torch.randn(number, 64)
        (peak,), (plain_peak,) = _steps(model, inputs, 1), _steps(plain, inputs, 1)
        assert _equal_gradients(model, plain)
        shares.append(peak / plain_peak)
    return shares


def test_a_percentage_is_of_the_largest_step() -> None:
    """Of which one is seen as it is, whenever it comes."""
    torch.manual_seed(0)
    plain = _Plain()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="60%")
    try:
        shares = _peaks(model, plain, [512, 512, 2048, 2048, 2048])
        assert model.forward.is_online
    finally:
        lowtide.restore(model)
    assert max(shares[1], *shares[3:]) <= 0.6


class _Widening(_Plain):
    """Makes more rows of its own after a while, as a network that grows by steps makes larger images."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.repeat(self.times, 1))


def test_a_model_that_outgrows_a_percentage_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = _Widening()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="60%")
    try:
        _peaks(model, plain, [256, 256])
        assert model.forward.is_online
        plain.times = model.times = 8
        shares = _peaks(model, plain, [256, 256])
    finally:
        lowtide.restore(model)
    assert max(shares) < 0.6
    assert "goes on above its budget" in caplog.text


@pytest.mark.parametrize("make", [_Dynamic, _Plain])
def test_gradients_that_exceed_the_budget_alone_are_told(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """They are evicted while the first step runs, and there again when it ends; later ones keep what the end takes anyway."""
    model, inputs = make(), torch.randn(4, 64)
    budget = sum(each.nbytes for each in model.parameters()) // 2
    lowtide.rematerialize(model, budget=budget, on_capture_error="online")
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        peaks, evictions = [], []
        for _ in range(3):
            peaks += _steps(model, inputs, 1)
            evictions.append(model.forward._online._context.statistics.evictions)  # type: ignore[union-attr]
    lowtide.restore(model)
    assert min(peaks) > budget
    assert max(peaks) == peaks[0] and max(evictions[1:]) < evictions[0]
    assert len([1 for record in caplog.records if "goes on above its budget" in record.message]) == 1


def test_steps_that_fit_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """A percentage is of the largest so far."""
    torch.manual_seed(0)
    model, inputs = _Dynamic(), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    (peak,) = _steps(plain, inputs, 1)
    (shorter,) = _steps(plain, inputs[:256], 1)
    lowtide.rematerialize(model, budget="100%")
    try:
        assert _steps(model, inputs[:256], 3) == [shorter] * 3
        assert _steps(model, inputs, 1) == [peak]
    finally:
        lowtide.restore(model)
    assert "runs under lowtide.online" not in caplog.text


def test_the_context_is_left_once_all_passes_are_over() -> None:
    """Also by a call that fails, and where nobody holds what a call returned."""
    model, inputs, backward = _Dynamic(), torch.randn(512, 64), torch.autograd.backward
    lowtide.rematerialize(model, budget="1MiB")
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(3, 7))
    assert not is_inside()
    first, second = model(inputs), 2 * model(inputs)
    assert is_inside() and torch.autograd.backward is not backward
    second.backward()
    assert is_inside()
    first.backward()
    assert not is_inside() and torch.autograd.backward is backward
    with torch.no_grad():
        model(inputs)
    assert not is_inside()
    dropped = model(inputs)
    del dropped
    model(inputs).backward()
    assert not is_inside()


def test_a_model_that_is_gone_leaves_the_context() -> None:
    model, backward = _Dynamic(), torch.autograd.backward
    lowtide.rematerialize(model, budget="1MiB")
    result = model(torch.randn(512, 64))
    assert is_inside()
    del model
    gc.collect()
    assert not is_inside() and torch.autograd.backward is backward
    result.backward()


def test_a_backward_pass_that_fails_leaves_the_context() -> None:
    """What the thread does then is outside of the budget."""
    torch.manual_seed(0)
    model, inputs = _Dynamic(), torch.randn(512, 64)
    lowtide.rematerialize(model, budget="400KiB")
    result = model(inputs)
    result.register_hook(_fails)
    with pytest.raises(ZeroDivisionError):
        result.backward()
    assert not is_inside()
    lowtide.restore(model)


def _fails(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_model_that_is_gone_after_the_budget_was_too_small_leaves_the_context() -> None:
    """For code of the caller's own, between the two passes."""

    def step() -> None:
        model = lowtide.rematerialize(_Dynamic(), budget="1MiB", on_capture_error="online")
        loss = model(torch.randn(8, 64))
        torch.zeros(1 << 20)
        loss.backward()

    with pytest.raises(lowtide.OnlineBudgetError, match="at once") as raised:
        step()
    del raised
    gc.collect()
    assert not is_inside()


def test_code_that_goes_on_after_the_budget_was_too_small_for_it_runs() -> None:
    """The caller's own, between the two passes; the next step is held to the budget again."""
    model = lowtide.rematerialize(_Dynamic(), budget="1MiB", on_capture_error="online")
    for _ in range(2):
        loss = model(torch.randn(8, 64))
        with pytest.raises(lowtide.OnlineBudgetError, match="at once"):
            torch.zeros(1 << 20)
        assert torch.ones(1 << 20).sum().item() == 1 << 20
        loss.backward()
        assert not is_inside()


def test_calls_that_wait_together_are_one_step() -> None:
    """A percentage is of what both hold."""
    torch.manual_seed(0)
    model, inputs = _Dynamic(), torch.randn(512, 64)
    plain = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        (model(inputs) * model(inputs + 1)).backward()

    peak = lowtide.measure(step, plain).peak_bytes
    lowtide.rematerialize(model, budget="60%")
    try:
        peaks = [lowtide.measure(step, model).peak_bytes for _ in range(4)]
        equal = _equal_gradients(model, plain)
    finally:
        lowtide.restore(model)
    assert equal and 0.3 * peak < max(peaks[1:]) <= 0.6 * peak


def test_bad_settings_are_refused() -> None:
    model, inputs = _Dynamic(), torch.randn(8, 64)
    with pytest.raises(lowtide.PlanError, match="in bytes"):
        lowtide.rematerialize(model, (inputs,), budget="40%", on_capture_error="online")
    with pytest.raises(lowtide.PlanError, match="on_capture_error"):
        lowtide.rematerialize(model, (inputs,), budget="1MiB", on_capture_error="eager")
    with pytest.raises(lowtide.CaptureError):
        lowtide.rematerialize(model, (inputs,), budget="1MiB", on_capture_error="error")


def test_gradients_that_arrive_otherwise_than_planned_inside() -> None:
    """A sum's, and those of a pass that runs twice: what comes to them elsewhere is a capture."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 16))
    plain, x = copy.deepcopy(model), torch.randn(8, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for one in (model, plain):
        torch.manual_seed(1)
        with lowtide.online("1MiB"), lowtide.checked(every=1):
            loss = one(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_nothing_is_planned_inside() -> None:
    """Calls run within the online budget, those of planned shapes, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for rows in (8, 5):
        with lowtide.online("1MiB"):
            model(x[:rows]).square().mean().backward()
            with pytest.raises(lowtide.PlanError, match="outside of lowtide"):
                lowtide.plan(plain, (x,), budget="100%", planner="greedy")
        plain(x[:rows]).square().mean().backward()
    assert len(lowtide.plans(model)) == 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("inner", ["forward", "step"])
def test_calls_in_other_threads(inner: str) -> None:
    """A thread that only runs forward passes leaves behind what anybody may read; one that trains is inside from its second
    step on."""
    torch.manual_seed(0)
    plain, inputs = _Dynamic(), torch.randn(512, 64)
    model = copy.deepcopy(plain)
    (peak,) = _steps(plain, inputs, 1)
    lowtide.rematerialize(model, (inputs,), budget=peak * 6 // 10, on_capture_error="online")
    found: list[Any] = []

    def forward() -> None:
        found.append(model(inputs * 1.0))
        assert not is_inside()

    def step() -> None:
        found.extend(_steps(model, inputs, 3))
        assert not is_inside()

    for _ in range(3 if inner == "forward" else 1):
        model.zero_grad()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(forward if inner == "forward" else step).result()
        if inner == "forward":
            found.pop().backward()
        assert _equal_gradients(model, plain)
    lowtide.restore(model)
    assert inner == "forward" or max(found[1:]) <= peak * 6 // 10 < found[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by Dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["in place", "module", "function"])
def test_calls_inside_of_what_is_compiled(compiled: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where Dynamo's frames end, no mode is left that would rebuild what was evicted."""
    torch.manual_seed(0)
    plain, inputs = _Dynamic(), torch.randn(512, 64)
    model = copy.deepcopy(plain)
    (peak,) = _steps(plain, inputs, 1)
    lowtide.rematerialize(model, (inputs,), budget=peak * 5 // 10, on_capture_error="online")
    call: Callable[[torch.Tensor], torch.Tensor] = model
    if compiled == "in place":
        model.compile(backend="eager")
    else:
        call = torch.compile(model if compiled == "module" else lambda x: model(x), backend="eager")
    for _ in range(3):
        model.zero_grad()
        call(inputs).backward()
        assert not is_inside()
    assert _equal_gradients(model, plain)
    assert caplog.text.count("the online mode ends with each call") == 1

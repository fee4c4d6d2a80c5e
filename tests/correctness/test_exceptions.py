"""Rows: an exception inside forward or backward, then a new step: exact, no memory kept; data-dependent control flow."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import BATCH, WithLoss, perceptron, rows
from tests.support.records import assert_same_records, run_training, training_step
from tests.support.training import make, prepared

_STEP = training_step()


class _Tokens(nn.Module):
    """Fails inside an operator when an id is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.first = perceptron(3)
        self.embedding = nn.Embedding(10, 32)
        self.second = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.2), perceptron(3))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + self.embedding(ids)).square().mean()


def _inputs(iteration: int) -> Any:
    return (*rows()(iteration)[0], torch.arange(BATCH) % 10), {}


def test_exception_inside_forward() -> None:
    expected = run_training(make(_Tokens), _inputs, _STEP, 3)
    model = prepared(_Tokens, _inputs, "60%")
    with pytest.raises(IndexError):
        model(_inputs(0)[0][0], torch.full((BATCH,), 99))
    assert_same_records(run_training(model, _inputs, _STEP, 3), expected)


def test_exception_inside_forward_keeps_no_memory() -> None:
    model = prepared(_Tokens, _inputs, "60%")
    x = torch.randn(BATCH, 32)
    alive = weakref.ref(x)
    with contextlib.suppress(IndexError):
        model(x, torch.full((BATCH,), 99))
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("where", ["parameter hook", "output hook"])
def test_exception_inside_backward(where: str) -> None:
    def network() -> nn.Module:
        return nn.Sequential(perceptron(3), nn.Dropout(0.2), nn.BatchNorm1d(32), perceptron(3))

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    def failing(model: nn.Module) -> nn.Module:
        torch.manual_seed(9)
        y = model(*rows()(0)[0])
        handle = (model[0][2].weight if where == "parameter hook" else y).register_hook(fail)
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            y.square().mean().backward()
        handle.remove()
        return model

    expected = run_training(failing(make(network)), rows(), _STEP, 3)
    actual = run_training(failing(prepared(network, rows(), "60%")), rows(), _STEP, 3)
    assert_same_records(actual, expected)


def test_results_dropped_without_backward_keep_no_memory() -> None:
    model = prepared(lambda: WithLoss(perceptron(6)), rows(), "60%")
    x = torch.randn(BATCH, 32)
    alive = weakref.ref(x)
    loss = model(x)
    del loss, x
    gc.collect()
    assert alive() is None


class _DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if y.sum() > 0:  # the decision
            y = y * 2
        return y.square().mean()


def test_data_dependent_control_flow() -> None:
    lines, start = inspect.getsourcelines(_DataDependent.forward)
    line = start + next(index for index, text in enumerate(lines) if "the decision" in text)
    model = make(_DataDependent)
    with pytest.raises(lowtide.CaptureError) as caught:
        lowtide.rematerialize(model, *rows()(0), budget="70%", on_capture_error="error")
    assert "lowtide.online" in str(caught.value)
    assert f"test_exceptions.py:{line}" in str(caught.value)
    assert caught.value.source.endswith(f"test_exceptions.py:{line}")
    expected = run_training(make(_DataDependent), rows(), _STEP, 2)
    assert_same_records(run_training(model, rows(), _STEP, 2), expected)


class _DataDependentShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y[y.sum(-1) > 0].square().sum()


def test_data_dependent_shape() -> None:
    with pytest.raises(lowtide.CaptureError, match=r"lowtide\.online") as caught:
        lowtide.rematerialize(make(_DataDependentShape), *rows()(0), budget="70%", on_capture_error="error")
    assert "test_exceptions.py" in caught.value.source


class _LayerDrop(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(perceptron(1) for _ in range(4))
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.probability:
                continue
            x = layer(x)
        return x.square().mean()


def test_layer_drop_is_data_dependent() -> None:
    with pytest.raises(lowtide.CaptureError, match="random"):
        lowtide.rematerialize(make(lambda: _LayerDrop(0.3)), *rows()(0), budget="70%", on_capture_error="error")


def test_layer_drop_of_probability_zero() -> None:
    """Decided without the data; the random number is still drawn."""
    from tests.support.training import compare_training

    compare_training(lambda: _LayerDrop(0.0), rows(), budgets=("60%",))


def test_inputs_are_released_without_the_garbage_collector() -> None:
    model = prepared(lambda: WithLoss(perceptron(6)), rows(), "60%")
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(BATCH, 32)
        alive = weakref.ref(x)
        model(x).backward()
        del x
        assert alive() is None
    finally:
        gc.enable()


class _Falls(nn.Module):
    """Goes on where an operator fails, which depends on values: in a function of its own, after random numbers were drawn, and
    before a buffer is written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron(3), perceptron(3)
        self.register_buffer("calls", torch.zeros(()))

    def factor(self, h: torch.Tensor) -> torch.Tensor:
        square = h.t() @ h / len(h) + self.second[0].weight.mean()
        try:
            return torch.linalg.cholesky(square - square.detach().diagonal().mean() * 0.5 * self.shift * torch.eye(32))
        except torch.linalg.LinAlgError:
            return square.diagonal().clamp(min=0.1).diag()

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        self.shift = shift
        h = torch.dropout(self.first(x), 0.1, self.training)
        h = h @ self.factor(h + 3 * torch.randn(BATCH, 32))
        self.calls += 1
        return self.second(h).square().mean()


def _shifted(iteration: int) -> Any:
    return (*rows()(iteration)[0], torch.tensor(float(iteration % 3 == 2) * 9)), {}


def test_an_operator_that_fails_where_forward_goes_on() -> None:
    expected = run_training(make(_Falls), _shifted, _STEP, 7)
    model = prepared(_Falls, _shifted, "80%")
    assert_same_records(run_training(model, _shifted, _STEP, 7), expected)
    assert len(lowtide.plans(model)) >= 1

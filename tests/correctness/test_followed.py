"""Tensors in plain attributes that change are inputs of the program, as buffers are: hidden states, running means, parameters
that are not registered, and what is set anew before every call."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import lowtide
from tests.support.training import compare_training, make

WIDTH = 32
Use = Callable[[Any, torch.Tensor], torch.Tensor]


class _Model(nn.Module):
    """``use(self, h)`` computes with plain attributes in the middle of it."""

    def __init__(self, use: Use, **attributes: Any) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.after = copy.deepcopy(self.before)
        self.use = use
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.use(self, self.before(x))).square().mean()


def _inputs(iteration: int) -> Any:
    return (torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(iteration)),), {}


def _hidden(model: Any, h: torch.Tensor) -> torch.Tensor:
    """As a recurrent network that keeps its state from batch to batch."""
    before = torch.zeros(WIDTH) if model.hidden is None else model.hidden
    model.hidden = (0.5 * before + h.mean(0)).detach()
    return h + before


def _pair(model: Any, h: torch.Tensor) -> torch.Tensor:
    hidden, cell = model.state
    model.state = ((hidden + h.mean(0)).detach(), cell * 0.5 + 1)
    return h * cell + hidden


def _item(model: Any, h: torch.Tensor) -> torch.Tensor:
    result = h + model.table["mean"]
    model.table["mean"] = h.mean(0).detach()
    return result


def _field(model: Any, h: torch.Tensor) -> torch.Tensor:
    result = h + model.box.mean
    model.box.mean = h.mean(0).detach()
    return result


def _written(model: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        model.calls += 1
    return (h - model.mean) / model.calls


def _unregistered(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * model.scales[0]


def _threshold(model: Any, h: torch.Tensor) -> torch.Tensor:
    """A constant: a question about its value has an answer."""
    return h.sin() if model.threshold.item() > 0.5 else h


CASES: dict[Use, Callable[[], dict[str, Any]]] = {
    _hidden: lambda: {"hidden": None},
    _pair: lambda: {"state": (torch.zeros(WIDTH), torch.ones(WIDTH))},
    _item: lambda: {"table": {"mean": torch.zeros(WIDTH)}},
    _field: lambda: {"box": SimpleNamespace(mean=torch.zeros(WIDTH))},
    _written: lambda: {"mean": torch.zeros(WIDTH), "calls": torch.zeros(())},
    _unregistered: lambda: {"scales": [nn.Parameter(torch.full((WIDTH,), 0.5))]},
    _threshold: lambda: {"threshold": torch.tensor(0.7)},
}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, SimpleNamespace):
        yield from _tensors(vars(value))
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _kept(model: nn.Module, names: Any) -> list[torch.Tensor]:
    found = [tensor for name in names for tensor in _tensors(getattr(model, name))]
    return [t for tensor in found for t in (tensor.detach().clone(), tensor.grad) if t is not None]


@pytest.mark.parametrize("use", CASES, ids=lambda use: use.__name__)
def test_as_eager_to_the_bit(use: Use) -> None:
    outcomes = compare_training(lambda: _Model(use, **CASES[use]()), _inputs, iterations=4)
    assert outcomes


@pytest.mark.parametrize("use", CASES, ids=lambda use: use.__name__)
def test_what_is_kept(use: Use) -> None:
    """After every call, for calls of several shapes, with at most one more plan for what begins as ``None``."""
    plain, planned = (make(lambda: _Model(use, **CASES[use]())) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for iteration, rows in enumerate((256, 256, 64, 256, 64)):
        for model in (plain, planned):
            model(_inputs(iteration)[0][0][:rows]).backward()
        assert_close(_kept(planned, CASES[use]()), _kept(plain, CASES[use]()), rtol=0, atol=0)
    assert len(lowtide.plans(planned)) <= 2 + (use is _hidden)


def test_nothing_is_captured_again_for_other_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """Once, until it is known that they change."""
    plain, planned = (make(lambda: _Model(lambda model, h: h * model.condition)) for _ in range(2))
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for iteration in range(5):
            for model in (plain, planned):
                model.condition = torch.randn(WIDTH, generator=torch.Generator().manual_seed(iteration))
                if model is planned and iteration == 0:
                    lowtide.rematerialize(planned, _inputs(0)[0], budget="90%", planner="greedy")
                model.zero_grad()
                model(*_inputs(iteration)[0]).backward()
            for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
                assert torch.equal(expected.grad, found.grad)
    assert caplog.text.count("captured again") == 1


def test_one_tensor_in_two_attributes() -> None:
    """While it is one, and when it is two."""

    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        return h * model.one + model.two

    plain, planned = (make(lambda: _Model(use)) for _ in range(2))
    for model in (plain, planned):
        model.one = model.two = torch.ones(WIDTH)
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for iteration in range(5):
        for model in (plain, planned):
            model.one = torch.full((WIDTH,), float(iteration))
            if iteration % 2:
                model.two = model.one
            model.zero_grad()
            model(*_inputs(iteration)[0]).backward()
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_one_backward_pass_through_several_calls() -> None:
    """Through what they leave to each other."""

    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        before = torch.zeros(WIDTH) if model.hidden is None else model.hidden
        model.hidden = h.mean(0)
        return h + before

    plain, planned = (make(lambda: _Model(use, hidden=None)) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for _ in range(2):
        for model in (plain, planned):
            model.hidden = None
            model.zero_grad()
            torch.stack([model(*_inputs(call)[0]) for call in range(3)]).sum().backward()
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_computed_by_a_hook_of_the_model() -> None:
    """As ``weight_norm`` of the model has it: its gradient goes on from there."""

    class Root(_Model):
        def __init__(self) -> None:
            super().__init__(lambda model, h: h * model.scale)
            self.logarithm = nn.Parameter(torch.zeros(WIDTH))
            self.scale = self.logarithm.exp()
            self.register_forward_pre_hook(lambda module, args: setattr(module, "scale", module.logarithm.exp()))

    compare_training(Root, _inputs, budgets=("80%",), check_peak=False)


def test_a_teacher_that_is_not_registered() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.net(x) - self.teacher[0](x).detach() * 2).square().mean()

    compare_training(Student, _inputs)

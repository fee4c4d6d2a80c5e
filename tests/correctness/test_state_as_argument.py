"""A parameter or a buffer of the model among the arguments is one tensor with that of the model, as in eager."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.beside import assert_as_eager

Argument = Callable[[Any], torch.Tensor]


class _Counting(nn.Module):
    """Writes into a buffer, and multiplies with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.ones(4))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return torch.tanh(self.norm(self.first(x))) * other


class _Replacing(_Counting):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.first(x) + self.steps) * other
        self.steps = self.steps * 0.5
        return out


def _step(model: Any, argument: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    out: torch.Tensor = model(torch.randn(3, 4), argument)
    out.sum().backward()  # in another layout than is planned for: the first step makes another program
    return out


_STATE: dict[str, Argument] = {
    "buffer": lambda model: model.steps,
    "statistics": lambda model: model.norm.running_mean,
    "weight": lambda model: model.norm.weight,
    "view": lambda model: model.steps[:],
    "detached": lambda model: model.norm.running_var.detach(),
}


@pytest.mark.parametrize("argument", _STATE.values(), ids=_STATE.keys())
@pytest.mark.parametrize("make", [_Counting, _Replacing])
def test_state_as_an_argument(make: Callable[[], nn.Module], argument: Argument) -> None:
    assert_as_eager(make, lambda model, number: _step(model, argument(model)))


def test_state_in_some_calls() -> None:
    """Another program, although shapes are the same."""
    planned = assert_as_eager(
        _Counting, lambda model, number: _step(model, model.steps if number % 3 else torch.ones(4)), steps=6
    )
    assert len(lowtide.plans(planned)) == 2


def test_one_capture_serves_all_calls(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lowtide"):
        assert_as_eager(_Counting, lambda model, number: _step(model, model.norm.running_mean))
    assert not [text for text in caplog.messages if "captured again" in text]


class _Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.norm(self.first(x)))) * self.norm.running_mean


def test_statistics_that_are_computed_with() -> None:
    """What the norm made of them is computed again for other gradients, from what they were before."""
    assert_as_eager(_Statistics, lambda model, number: _summed(model))


def _summed(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    out: torch.Tensor = model(torch.randn(3, 4))
    out.sum().backward()
    return out

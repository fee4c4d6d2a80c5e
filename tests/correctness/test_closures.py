"""Row: functions in attributes that close over the model or a part of it, as heads that are tied to an embedding do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import rows as inputs
from tests.support.training import MINIMUM, compare_training

WIDTH = 32


class _Remade(nn.Module):
    """Makes anew what it holds where it is copied, as layers of einops do."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.kept = factor, {"factor": (factor, [factor])}

    def __getstate__(self) -> Any:
        return {"factor": self.factor}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["factor"])  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kept["factor"][0]


class Tied(nn.Module):
    """``make(self)`` gives it the function that is its head."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.remade = _Remade(2.0)
        self.head = make(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(y).square().mean()


def _over_self(self: Any) -> Any:
    return lambda y: y @ self.first.weight.t()


def _over_a_parameter(self: Any) -> Any:
    weight = self.first.weight
    return lambda y: y @ weight.t()


def _by_default(self: Any) -> Any:
    return lambda y, layer=self.first: layer(y)


def _nested(self: Any) -> Any:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return y @ self.first.weight.t()

    return lambda y: inner(y) + inner(y * 2)


def _partial(self: Any) -> Any:
    return partial(lambda scale, y: y @ self.first.weight.t() * scale, 3.0)


def _shared(self: Any) -> Any:
    def set_scale(value: float) -> None:
        nonlocal scale
        scale = value

    scale = 2.0
    self.set_scale = set_scale
    return lambda y: y @ self.first.weight.t() * scale


def _remade(self: Any) -> Any:
    return lambda y: self.remade(y @ self.first.weight.t())


def _by_method(self: Any) -> Any:
    forward = self.first.forward
    return lambda y: forward(y)


def _by_default_method(self: Any) -> Any:
    return lambda y, *, forward=self.first.forward: forward(y)


def _by_partial_of_a_method(self: Any) -> Any:
    scaled = partial(lambda forward, scale, y: forward(y) * scale, self.first.forward, 3.0)
    return lambda y: scaled(y)


def _wrapping_forward(self: Any) -> Any:
    """Twice, as trainers replace it: by a function, and by a method."""
    for _ in range(2):
        forward = self.first.forward
        self.first.forward = MethodType(lambda layer, y, forward=forward: forward(y) * layer.weight.sum(), self.first)
    return self.first.forward


MAKE = [_over_self, _over_a_parameter, _by_default, _nested, _partial, _shared, _remade]
MAKE += [_by_method, _by_default_method, _by_partial_of_a_method, _wrapping_forward]


@pytest.mark.parametrize("make", MAKE)
def test_heads_that_close_over_the_model(make: Callable[[Any], Any]) -> None:
    (outcome, *_) = compare_training(
        lambda: Tied(make), inputs(), budgets=("80%", MINIMUM), quick=0, on_capture_error="error", dynamic=False
    )
    assert len(lowtide.plans(outcome.model)) == 1


def _steps(model: Any, change: Callable[[Any, int], None]) -> list[Any]:
    found = []
    for step in range(5):
        change(model, step)
        model.zero_grad()
        loss = model(inputs()(step)[0][0])
        loss.backward()
        found.append((loss.item(), model.first.weight.grad.tolist()))
    return found


def _plain_and_planned(make: Callable[[Any], Any], change: Callable[[Any, int], None]) -> list[list[Any]]:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Tied(make)
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        found.append(_steps(model, change))
    return found


def _set_scale(model: Any, step: int) -> None:
    model.set_scale(1.0 + step // 2)


def _other_cell(model: Any, step: int) -> None:
    if step == 2:
        torch.manual_seed(1)
        model.other = Tied(_over_self)
        model.head.__closure__[0].cell_contents = model.other


def _other_default(model: Any, step: int) -> None:
    if step == 2:
        model.head.__defaults__ = (model.second,)


CHANGES = [(_shared, _set_scale), (_over_self, _other_cell), (_by_default, _other_default)]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_changes_of_what_it_closes_over(make: Callable[[Any], Any], change: Callable[[Any, int], None]) -> None:
    plain, planned = _plain_and_planned(make, change)
    assert plain == planned


def test_counts_in_a_closure_beside_the_model() -> None:
    """A counter that a planned call would leave as it is must not be read."""

    def counting(self: Any) -> Any:
        calls = 0

        def head(y: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            made: torch.Tensor = y @ self.first.weight.t() * (2.0 if calls > 2 else 1.0)
            return made

        return head

    plain, planned = _plain_and_planned(counting, lambda model, step: None)
    assert plain == planned

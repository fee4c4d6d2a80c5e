"""Hooks of parameters are called in eager's order, in whichever a plan computes gradients: some draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

WIDTH = 16


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        result: torch.Tensor = self.drop(self.norm(x))
        return result


def _noisy(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + torch.randn_like(gradient)


def _add_noise(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(torch.randn_like(parameter))


def _update(parameter: torch.Tensor) -> None:
    """And let go of the gradient, as optimizers that work in the backward pass do."""
    _add_noise(parameter)
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
    parameter.grad = None


HOOKS: dict[str, Callable[[Any], Any]] = {
    "noise": lambda parameter: parameter.register_hook(_noisy),
    "noise afterwards": lambda parameter: parameter.register_post_accumulate_grad_hook(_add_noise),
    "an update": lambda parameter: parameter.register_post_accumulate_grad_hook(_update),
}


def _trained(name: str, planned: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Deep()
    x = torch.randn(64, WIDTH)
    if planned:
        lowtide.rematerialize(model, (x,), budget="60%", planner="auto{effort=0}", planning="wait")
    found = []
    for step in range(4):
        if step == 1:
            for parameter in model.parameters():
                HOOKS[name](parameter)
        torch.manual_seed(step)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), torch.get_rng_state()]
        found += [one.detach().clone() for p in model.parameters() for one in (p, p.grad) if one is not None]
    return found


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_draw_in_the_order_of_eager(name: str) -> None:
    expected, found = (_trained(name, planned) for planned in (False, True))
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


def test_hooks_are_called_in_the_order_of_eager() -> None:
    orders: list[list[str]] = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, x = _Deep(), torch.randn(64, WIDTH)
        if planned:
            lowtide.rematerialize(model, (x,), budget="60%", planner="auto{effort=0}", planning="wait")
        orders.append([])
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: orders[-1].append(name))
        model(x).sum().backward()
    assert orders[0] == orders[1] and len(orders[0]) == 10


class _Frozen(nn.Module):
    """Computes with one of its layers, where it is ``frozen``, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        with torch.set_grad_enabled(not self.frozen):
            z = self.second(y)
        return (y * z).sum()


def _called(frozen: list[bool], planned: bool) -> list[tuple[str, bool]]:
    """Which parameters have their hooks called in such steps, and whether without a gradient."""
    torch.manual_seed(0)
    model, calls, x = _Frozen(), list[tuple[str, bool]](), torch.randn(8, WIDTH)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append((name, gradient is None)))
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: calls.append((name, one.grad is None)))
    model.frozen = frozen[0]
    if planned:
        lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for model.frozen in frozen:
        model.zero_grad()
        model(x).backward()
    return sorted(calls)


@pytest.mark.parametrize("frozen", [[True], [False, True, False]])
def test_hooks_of_parameters_that_get_no_gradient_are_not_called(frozen: list[bool]) -> None:
    assert _called(frozen, planned=True) == _called(frozen, planned=False)

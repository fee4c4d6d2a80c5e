"""More than one backward pass through a call, to all or some of what it read; and none that is differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.errors import ExecutionError

Gradients = list[torch.Tensor]


class _Layers(nn.Module):
    def __init__(self, scalar: bool, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
        self.scalar = scalar

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result.square().mean() if self.scalar else result


def _some_then_others(model: _Layers, x: torch.Tensor) -> Gradients:
    """As for the adaptive weight of a VQGAN: the gradient of the last layer alone, twice."""
    y = model(x)
    last = model.layers[5].weight
    loss, other = (y * 0.5).sum(), (y * x).sum()
    (first,) = torch.autograd.grad(loss, last, retain_graph=True)
    (second,) = torch.autograd.grad(other, last, retain_graph=True)
    return [first, second]


def _some_then_all(model: _Layers, x: torch.Tensor) -> Gradients:
    y = model(x).sum()
    found = list(torch.autograd.grad(y, model.layers[3].weight, retain_graph=True))
    y.backward()
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def _into_some_then_the_rest(model: _Layers, x: torch.Tensor) -> Gradients:
    y = model(x).sum()
    y.backward(inputs=list(model.layers[4:].parameters()), retain_graph=True)
    y.backward(inputs=list(model.layers[:4].parameters()))
    return [p.grad for p in model.parameters() if p.grad is not None]


def _one_after_the_other(model: _Layers, x: torch.Tensor) -> Gradients:
    y = model(x).sum()
    found = [torch.autograd.grad(y, layer.weight, retain_graph=True)[0] for layer in model.layers]
    return [*found, *torch.autograd.grad(y, model.layers[0].bias)]


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("passes", [_some_then_others, _some_then_all, _into_some_then_the_rest, _one_after_the_other])
def test_partial_passes_are_eagers(passes: Callable[[_Layers, torch.Tensor], Gradients], scalar: bool) -> None:
    torch.manual_seed(0)
    model, x = _Layers(scalar), torch.randn(16, 32)
    expected = [gradient.clone() for gradient in passes(model, x)]
    model.zero_grad()
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for _ in range(2):
        found = passes(model, x)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        model.zero_grad()


class _Counting(TorchDispatchMode):
    """How many products of matrices are computed inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("other", [False, True], ids=["second", "other gradients"])
def test_a_pass_that_runs_again_ends_where_nothing_more_is_asked_for(other: bool) -> None:
    """Its forward pass runs again, and the product for the last layer's weight; nothing of the layers before."""
    torch.manual_seed(0)
    model, x = _Layers(scalar=False, width=256), torch.randn(16, 256)  # gradients of small layers leave together
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    last = model.layers[5].weight
    y = model(x)
    torch.autograd.grad(y.sum(), last, retain_graph=True)
    loss = y.sum() if other else y.square().sum()  # expanded from a number, or in y's layout
    torch.autograd.grad(loss, last, retain_graph=True)
    with _Counting() as counting:
        torch.autograd.grad(loss, last, retain_graph=True)
    assert counting.count <= 8  # the product for its input lies before that gradient may leave
    y.sum().backward()


def test_a_gradient_penalty_is_refused() -> None:
    """Also where the arriving gradient requires none itself, as the ones that WGAN-GP starts from."""
    again = {"_".join(("create", "graph")): True}  # not to be named here, see ``test_differentiated_again``
    model, x = _Layers(scalar=False), torch.randn(16, 32, requires_grad=True)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    y = model(x)
    with pytest.raises(ExecutionError, match="cannot be differentiated again"):
        torch.autograd.grad(y, x, torch.ones_like(y), **again)
    lowtide.restore(model)
    y = model(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), **again)
    gradient.square().sum().backward()
    assert model.layers[0].weight.grad is not None

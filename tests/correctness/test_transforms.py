"""``torch.func``, forward-mode derivatives, tracing and export of a planned model: as without a plan, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import lowtide
from tests.support.networks import generator

_X = torch.randn(4, 8, generator=generator(0))


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _planned() -> nn.Module:
    return lowtide.rematerialize(_network(), (torch.ones(4, 8),), budget="100%", planner="greedy")


def _gradients(model: nn.Module) -> Any:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (_X,)).square().sum()

    return [*torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()}).values()]


def _tangent(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(model(forward_ad.make_dual(_X, _X.cos()))).tangent.detach()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
@pytest.mark.parametrize(
    "use",
    [
        _gradients,
        _tangent,
        lambda model: [torch.vmap(lambda x: model(x))(torch.stack([_X, _X + 1])).detach()],
        lambda model: [*torch.func.jvp(model, (_X,), (_X.cos(),))],
        lambda model: [torch.jit.trace(model, (_X,), check_trace=False)(_X + 1).detach()],
        lambda model: [torch.export.export(model, (_X,)).module()(_X + 1).detach()],
        lambda model: [torch.export.export(model.eval(), (_X,)).module()(_X + 1).detach()],
    ],
    ids=["grad", "dual", "vmap", "jvp", "trace", "export", "export in eval"],
)
def test_as_without_a_plan(use: Callable[[nn.Module], list[torch.Tensor]]) -> None:
    for ours, theirs in zip(use(_planned()), use(_network()), strict=True):
        assert torch.equal(ours, theirs)


def test_what_runs_without_a_plan_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _planned()
    for _ in range(2):
        _gradients(model)
    assert caplog.text.count("without a plan, outside the budget") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_says_what_to_do() -> None:
    model = _planned()
    with pytest.raises(AttributeError, match="restore"):
        torch.jit.script(model)
    assert torch.equal(torch.jit.script(lowtide.restore(model))(_X), _network()(_X))


def test_batched_gradients_are_refused() -> None:
    model = _planned()
    with pytest.raises(lowtide.ExecutionError, match="one gradient at a time"):
        torch.autograd.grad(model(_X), [*model.parameters()], torch.ones(3, 4, 8), is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by Dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_inside_of_torch_compile_by_its_plan() -> None:
    """Dynamo breaks there: it does not trace what runs a plan."""
    gradients, planned = [], _planned()
    for model in (_network(), torch.compile(planned, backend="eager")):
        for _ in range(2):
            model(_X).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert planned.forward.ran == 2

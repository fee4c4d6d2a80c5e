"""Modules that are made of the attributes of a planned one run with their own parameters, buffers and attributes."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import WithLoss, generator
from tests.support.training import compare_training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), 1.0
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.norm(self.body(x))) * self.weight + self.shift).square().sum() * self.scale

    def direct(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.forward(x)
        return loss


class Functional(Net):
    """Given a part of its code by a class of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _bare(model: nn.Module, kind: type = Net) -> Any:
    made = kind.__new__(kind)
    vars(made).update(vars(model))
    return made


def _functional(model: nn.Module, kind: type = Functional) -> Any:
    """As libraries for gradients of gradients do: other parameters in registries of their own, submodules too."""
    made: Any = _bare(model, kind if type(model) is Net else type(model))
    for registry in ("_parameters", "_buffers", "_modules"):
        vars(made)[registry] = dict(vars(model)[registry])
    for name, parameter in model._parameters.items():
        if parameter is not None:
            made._parameters[name] = (parameter * 1.5).detach().requires_grad_()
    for name, module in model._modules.items():
        made._modules[name] = _functional(module)
    return made


def _replica(model: Any) -> Any:
    made = model._replicate_for_data_parallel()
    for name, parameter in model._parameters.items():
        setattr(made, name, (parameter * 2).detach().requires_grad_())
    return made


def _copied(model: Any) -> Any:
    made = copy.copy(model)
    made.scale = 3.0
    return made


COPIES: dict[str, Callable[[Any], Any]] = {
    "attributes": lambda model: _changed(_bare(model)),
    "another class": lambda model: _bare(model, Functional),
    "functional": _functional,
    "copy.copy": _copied,
    "replica": _replica,
    "copy of a copy": lambda model: _changed(copy.copy(_functional(model))),
    "deep copy of a copy": lambda model: copy.deepcopy(_functional(model)),
}


def _changed(model: Any) -> Any:
    model.scale = 0.5
    return model


def _trained(make: Callable[[Any], Any], planned: bool, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """Steps of a model and its copy in turn."""
    torch.manual_seed(0)
    model = Net()
    if planned:
        lowtide.rematerialize(model, budget="100%", planner="keep-all")
    found: list[torch.Tensor] = []
    model(torch.randn(3, 4)).backward()
    twin = make(model)
    for _ in range(3):
        for one in (twin, model):
            loss = call(one, torch.randn(3, 4))
            tensors = [p for p in one.parameters() if p is not None] or list(one._parameters.values())
            found += [loss.detach(), *torch.autograd.grad(loss, [one.weight, *tensors], allow_unused=True)]
            found += [buffer.clone() for buffer in one.buffers()]
    assert [type(one.forward).__name__ == "Rematerialized" for one in (model, twin)] == [planned, False]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("call", ["module", "method"])
@pytest.mark.parametrize("case", COPIES)
def test_copies_have_parameters_of_their_own(case: str, call: str, caplog: pytest.LogCaptureFixture) -> None:
    def called(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x) if call == "module" else model.direct(x)
        return loss

    plain = _trained(COPIES[case], False, called)
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        planned = _trained(COPIES[case], True, called)
    assert len(plain) == len(planned) and all(map(torch.equal, plain, planned))
    assert caplog.text.count("attributes of a planned model runs without a plan") == 1


def test_a_copy_that_is_planned_itself() -> None:
    model = lowtide.rematerialize(Net(), budget="100%", planner="keep-all")
    twin = _functional(model)
    with pytest.raises(lowtide.PlanError, match="not rematerialized"):
        lowtide.restore(twin)
    lowtide.rematerialize(twin, budget="100%", planner="keep-all")
    x = torch.randn(3, 4)
    for one in (model, twin):
        loss = one(x)
        plain = type(one).forward(one, x)
        assert torch.equal(loss, plain) and len(lowtide.plans(one)) == 1
        assert torch.equal(*(torch.autograd.grad(each, [one.weight])[0] for each in (loss, plain)))
    lowtide.restore(twin)
    assert "forward" in vars(model) and "forward" not in vars(twin)


def test_a_copy_of_a_model_that_is_gone() -> None:
    model = lowtide.rematerialize(Net(), budget="100%", planner="keep-all")
    twin = copy.copy(model)
    del model
    gc.collect()
    assert torch.equal(twin(torch.ones(3, 4)), Net.forward(twin, torch.ones(3, 4)))


def test_a_copy_of_a_forward_of_its_own() -> None:
    """Which is the planned module's, in eager too."""
    model = Net()
    model.forward = types.MethodType(lambda self, x: Net.forward(self, x) * 5, model)  # type: ignore[method-assign]
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    twin = _functional(model)
    assert torch.equal(twin(torch.ones(3, 4)), Net.forward(model, torch.ones(3, 4)) * 5)


def test_a_copy_whose_forward_is_called_by_itself() -> None:
    """Nothing tells which of the two it is called for."""
    model = lowtide.rematerialize(Net(), budget="100%", planner="keep-all")
    x = torch.ones(3, 4)
    model.forward(x).backward()
    twin = _functional(model)
    with pytest.raises(lowtide.ExecutionError, match=r"module\(x\)"):
        twin.forward(x)
    twin(x).backward()
    assert torch.equal(twin.forward(x), Net.forward(twin, x) * 2) and torch.equal(
        model.forward(x), Net.forward(model, x)
    )


def test_copies_inside_of_a_model_that_runs_in_parts() -> None:
    class Meta(nn.Module):
        """An inner step of its part, by a functional copy, then a loss that decides by data."""

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.part(x).square().mean()
            fast = copy.copy(self.part)
            vars(fast)["_modules"] = {name: copy.copy(one) for name, one in self.part._modules.items()}
            for module in fast._modules.values():
                vars(module)["_parameters"] = {
                    name: (parameter * 0.9).detach().requires_grad_() for name, parameter in module._parameters.items()
                }
            loss = loss + fast(x).square().mean()
            return loss * 2 if loss > 0 else loss

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Meta()
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        for _ in range(3):
            model(torch.randn(3, 4)).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


class _CopiesItself(nn.Module):
    def __init__(self, how: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.how = nn.Linear(8, 8), nn.BatchNorm1d(8), how

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.how(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def _made_anew(module: _CopiesItself) -> _CopiesItself:
    other = _CopiesItself(module.how)
    other.load_state_dict(module.state_dict())
    return other


def _pickled(module: _CopiesItself) -> Any:
    return pickle.loads(pickle.dumps(module))


def _refused(module: _CopiesItself) -> Any:
    raise RuntimeError("not to be copied")


@pytest.mark.parametrize("how", [_made_anew, _pickled, _refused])
def test_modules_that_copy_themselves(how: Callable[[Any], Any]) -> None:
    def make_model() -> nn.Module:
        return WithLoss(nn.Sequential(nn.Linear(8, 8), _CopiesItself(how), nn.Tanh(), _CopiesItself(how)))

    compare_training(
        make_model,
        lambda i: ((torch.randn(64, 8, generator=generator(i)),), {}),
        budgets=("100%",),
        on_capture_error="error",
    )


class _KeptAsBytes(nn.Module):
    """Its state has a module as bytes, and makes another one of them: as code that a library has generated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: one for name, one in self._modules.items() if name != "inner"}
        return {**self.__dict__, "_modules": kept, "bytes": pickle.dumps(self.inner)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inner = pickle.loads(state.pop("bytes"))
        super().__setstate__(state)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def test_modules_with_a_state_of_their_own() -> None:
    compare_training(
        lambda: WithLoss(nn.Sequential(nn.Linear(8, 8), _KeptAsBytes(), nn.Tanh(), _KeptAsBytes())),
        lambda i: ((torch.randn(64, 8, generator=generator(i)),), {}),
        budgets=("100%",),
        on_capture_error="error",
    )


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_modules_made_of_an_exported_program() -> None:
    """Stages of a pipeline that PyTorch splits are, too: each module holds another of torch.fx, which copies itself."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 1)
        )
        return torch.export.unflatten(torch.export.export(model, (torch.randn(32, 16),)))

    found = []
    for planned in (False, True):
        model = build()
        if planned:
            lowtide.rematerialize(model, budget="90%", planner="auto{effort=1}", on_capture_error="error")
        torch.manual_seed(1)
        for _ in range(2):
            model(torch.randn(32, 16)).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert len(lowtide.plans(model)) == 1

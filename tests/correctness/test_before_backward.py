"""What changes between a forward pass and a backward pass that needs another program than was planned: that of ``out.sum()``
does, whose gradient comes expanded."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from tests.support.beside import assert_as_eager, assert_same_steps
from tests.support.training import make

Step = Callable[[nn.Module], torch.Tensor]


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        hidden = self.drop(self.norm(torch.tanh(self.first(x))))
        for other in others:
            hidden = hidden * (float(other[0]) if isinstance(other, np.ndarray) else other.scale)
        return self.last(hidden + torch.full((8,), 0.1)) * getattr(x, "scale", 1.0)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.first(x).view(2, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(query, key, value)


class _Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * (other.real + other.imag)


def _evaluated(model: nn.Module) -> torch.Tensor:
    model.train()
    out = model(torch.ones(3, 4))
    model.eval()
    return out


def _part_evaluated(model: nn.Module) -> torch.Tensor:
    model.train()
    out = model(torch.ones(3, 4))
    model.drop.eval()  # type: ignore[union-attr]
    return out


def _in_double(model: nn.Module) -> torch.Tensor:
    out = model(torch.ones(3, 4))
    torch.set_default_dtype(torch.float64)
    return out


def _scaled(model: nn.Module) -> torch.Tensor:
    x = torch.ones(3, 4)
    x.scale = 2.0  # type: ignore[attr-defined]
    return model(x)  # type: ignore[no-any-return]


def _with_kernel(model: nn.Module) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return model(torch.linspace(-1, 1, 256).view(2, 16, 8))  # type: ignore[no-any-return]


def _conjugated(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(3, 4), torch.full((4,), 1 + 2j).conj())  # type: ignore[no-any-return]


def _deterministically(model: nn.Module) -> torch.Tensor:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return model(torch.ones(3, 4))  # type: ignore[no-any-return]
    finally:
        torch.use_deterministic_algorithms(False)


class _Cast(_Dropping):
    """Under an autocast of its own, to whatever type that is by default."""

    def forward(self, *given: Any) -> Any:
        with torch.autocast("cpu"):
            return super().forward(*given)


def _cast_otherwise(model: nn.Module) -> torch.Tensor:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        return model(torch.ones(3, 4))  # type: ignore[no-any-return]
    finally:
        torch.set_autocast_dtype("cpu", before)


@pytest.mark.parametrize(
    "factory, step",
    [
        (_Dropping, _evaluated),
        (_Dropping, _part_evaluated),
        (_Dropping, _in_double),
        (_Dropping, _scaled),
        (_Attention, _with_kernel),
        (_Conjugated, _conjugated),
        (_Dropping, _deterministically),
        (_Cast, _cast_otherwise),
    ],
    ids=[
        *("evaluated", "part evaluated", "default dtype", "attribute of a tensor", "kernel", "conjugated"),
        *("deterministic", "type of an autocast"),
    ],
)
def test_the_program_for_other_gradients_is_of_the_forward_pass(factory: Callable[[], nn.Module], step: Step) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = factory()
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        found.append([])
        for number in range(4):
            torch.manual_seed(number)
            model.zero_grad()
            try:
                out = step(model)
                out.sum().backward()
            finally:
                torch.set_default_dtype(torch.float32)
            after = (out.detach(), torch.rand(()), torch.tensor(model.training), *model.buffers())
            found[-1] += [each.clone() for each in (*after, *(one.grad for one in model.parameters()))]
    assert len(lowtide.plans(model)) > 0
    assert all(map(torch.equal, *found))


@dataclasses.dataclass
class _Settings:
    scale: float
    more: dict[str, list[float]]


def test_objects_among_the_arguments_that_are_changed_before_the_backward_pass() -> None:
    """The program for the gradients that arrive is of what they held, and they hold afterwards what they were given since."""

    def step(model: nn.Module, _: int) -> Any:
        given = types.SimpleNamespace(scale=1.0), _Settings(2.0, {"some": [1.0, 2.0]})
        out = model(torch.ones(3, 4), *given)
        given[0].scale, given[1].scale = 3.0, 4.0
        given[1].added = True  # type: ignore[attr-defined]
        given[1].more["some"].append(5.0)
        given[1].more["none"] = []
        out.sum().backward()
        assert given == (types.SimpleNamespace(scale=3.0), _Settings(4.0, {"some": [1.0, 2.0, 5.0], "none": []}))
        assert vars(given[1])["added"]
        return out

    assert_as_eager(_Dropping, step, steps=1)


class _Layer(nn.Module):
    """Appends to what is handed on from layer to layer, as caches of keys and values are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.layer(x).sigmoid().tanh().softmax(-1)
        if self.number:
            cache.kept = weights.detach().numpy().copy()
        elif cache.kept is None:
            weights = weights * 2
        return weights * x, weights


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(0), _Layer(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = types.SimpleNamespace(kept=None)
        for layer in self.layers:
            x, _ = layer(x, cache)
        return x


def test_objects_that_parts_hand_on() -> None:
    """A layer that is planned has a gradient for one of its results alone, when the next one has written into the object."""

    def step(model: nn.Module, _: int) -> torch.Tensor:
        model.zero_grad()
        out: torch.Tensor = model(torch.randn(64, 8))
        out.square().sum().backward()
        return out

    plain, parts = make(_Layers), make(_Layers)
    lowtide.rematerialize(parts, (torch.randn(64, 8),), budget="95%")
    assert_same_steps(plain, parts, step, 3)
    assert lowtide.plans(parts)


def test_an_array_among_the_arguments_that_was_changed_is_refused() -> None:
    given = np.ones(2)
    model = _Dropping()
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    out = model(torch.ones(3, 4), given)
    given.fill(3.0)
    with pytest.raises(lowtide.ExecutionError, match="an object among its arguments"):
        out.sum().backward()


def test_hooks_of_all_modules_that_are_gone_are_refused() -> None:
    model = _Dropping()
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, out: None)
    with hook:
        out = model(torch.ones(3, 4))
    with pytest.raises(lowtide.ExecutionError, match="hooks of all modules"):
        out.sum().backward()


def test_submodules_that_are_new_are_refused() -> None:
    model = _Dropping()
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    out = model(torch.ones(3, 4))
    model.more = nn.Linear(2, 2)
    with pytest.raises(lowtide.ExecutionError, match="submodules have come or gone"):
        out.sum().backward()


class _Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.factor = nn.Linear(4, 4), nn.Parameter(torch.full((4, 4), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        for _ in range(4):
            out = torch.tanh(out @ self.factor) + torch.sin(out)
        return out.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("planned", [False, True])
def test_other_data_of_a_parameter_in_the_backward_pass(planned: bool) -> None:
    """Linear layers have views of the former; what multiplies with the parameter itself reads the latter, as in eager."""
    gradients = []
    for model in (make(_Powers), make(_Powers)):
        if planned and gradients:
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        loss = model(torch.ones(3, 4))
        for each in model.parameters():
            each.data = torch.ones_like(each)
        loss.backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("budget, passes", [("100%", 2), ("60%", 1)], ids=["again", "recomputed"])
def test_other_data_that_would_be_computed_with_again_are_refused(budget: str, passes: int) -> None:
    model: Any = make(_Powers)
    x = torch.ones(64, 4)
    lowtide.rematerialize(model, (x,), budget=budget, planner="greedy")
    out = model(x)
    if passes > 1:
        out.backward(retain_graph=True)
    model.factor.data = torch.ones(4, 4)
    with pytest.raises(lowtide.ExecutionError, match="factor was modified in place, or given other data"):
        out.backward()


class _Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Any) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scaled_by(gradient, ctx.model.strength * ctx.model.seen), None


_FACTORS = [2.0]


def _scaled_by(gradient: torch.Tensor, strength: float) -> torch.Tensor:
    return gradient * strength * _FACTORS[0]


class _Reading(nn.Module):
    """Its backward pass reads a variable and attributes, one of which the forward pass sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.strength, self.factor, self.seen = nn.Linear(4, 4), 3.0, 1.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = len(x)
        out = _Scaling.apply(torch.tanh(self.first(x)), self) * self.factor  # type: ignore[no-untyped-call]
        out.register_hook(lambda gradient: gradient * self.strength)
        return out.square().sum()  # type: ignore[no-any-return]


def _weaker(model: Any) -> None:
    model.strength /= 2


def _of_another_factor(model: Any) -> None:
    _FACTORS[0] /= 2


@pytest.mark.parametrize("change", [_weaker, _of_another_factor], ids=["attribute", "variable"])
def test_what_code_reads_in_the_backward_pass_was_changed_before(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}._FACTORS", [2.0])
    model = make(_Reading)
    lowtide.rematerialize(model, (torch.ones(3, 4),), budget="100%", planner="keep-all")
    model(torch.ones(3, 4)).backward()
    out = model(torch.ones(3, 4))
    change(model)
    with pytest.raises(lowtide.ExecutionError, match="Code reads it in the backward pass"):
        out.backward()


def test_what_code_reads_in_the_forward_pass_alone_may_be_changed_before_the_backward_pass() -> None:
    def step(model: Any, number: int) -> torch.Tensor:
        model.zero_grad()
        out: torch.Tensor = model(torch.ones(3 + number // 2, 4))
        model.factor /= 2
        out.backward()
        return out

    assert_as_eager(_Reading, step)

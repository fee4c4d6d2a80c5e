"""Numbers in dictionaries, lists and namespaces that are other ones in every call, and numbers of NumPy, are inputs as well."""

from __future__ import annotations

import copy
import logging
import math
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from tests.fuzz.changed import Computes, Thing, having, numbered_steps, rows
from tests.support.wide import pairs

STEPS = 10
Compute = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
Change = Callable[[Any, int], None]


class _Attributes(dict[str, Any]):
    """A dictionary whose items are read as attributes, as configurations often are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _Inner(nn.Module):
    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.sin() * self.weights["a"]


class _ReadsLate(torch.autograd.Function):
    """Reads a number of a holder in its backward pass, where it has found another one in the forward pass."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: Any) -> torch.Tensor:
        ctx.weights = weights
        return y * weights["a"]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.weights["b"], None


def _model(compute: Compute) -> Any:
    torch.manual_seed(0)
    attributes: dict[str, Callable[[], Any]] = {
        "weights": lambda: {"a": 0.1, "b": 0.7},
        "list": lambda: [0.1, 0.7, 2.0],
        "deep": lambda: {"loss": [{"a": 0.1}, {"a": 0.9}], 3: 0.5},
        "space": lambda: types.SimpleNamespace(a=0.1, inner=types.SimpleNamespace(b=0.4)),
        "counts": lambda: defaultdict(float, a=0.1),
        "config": lambda: _Attributes(a=0.1, b=0.9),
        "thing": lambda: Thing(weights={"a": 0.1}),
        "ordered": lambda: OrderedDict(b=0.7, a=0.1, c=0.3),
        "pair": lambda: ({"a": 0.1}, 0.3),
        "number": lambda: np.float64(0.1),
    }
    model = Computes(compute, having(**attributes))
    model.inner = _Inner(model.weights)
    model.inner.space = model.space
    model.ordered.move_to_end("b")
    return model


def _set(model: Any, step: int) -> None:
    value = 0.1 + 0.07 * step
    model.weights["a"], model.list[1], model.deep["loss"][1]["a"], model.deep[3] = value, -value, 2 * value, 1 / value
    model.space.a, model.space.inner.b, model.counts["a"], model.config["a"] = value, value / 3, value, 1 - value
    model.ordered["a"], model.ordered["b"] = value, 1 - value
    model.thing.weights["a"], model.pair[0]["a"], model.number = value, value, np.linspace(0.1, 0.9, STEPS)[step]


def _replaced(model: Any, step: int) -> None:
    _set(model, step)
    model.weights, model.list = dict(model.weights), [*model.list]
    model.inner.weights = model.weights
    model.deep, model.space = copy.deepcopy(model.deep), copy.deepcopy(model.space)
    model.inner.space, model.ordered = model.space, copy.copy(model.ordered)
    model.thing.weights = dict(model.thing.weights)


def _steps(model: Any, change: Change) -> list[Any]:
    return numbered_steps(model, change, STEPS, lambda model: (repr(model.weights), repr(model.list)))


HELD: dict[str, Compute] = {
    "dictionary": lambda self, y, x: y * self.weights["b"] + self.weights["a"] * y.square(),
    "list": lambda self, y, x: y * self.list[0] + self.list[1] * y.square(),
    "from the end": lambda self, y, x: y * self.list[-2],
    "nested": lambda self, y, x: y * self.deep["loss"][1]["a"] + y.exp() / (1 + self.deep[3]),
    "namespace": lambda self, y, x: y * self.space.a + self.space.inner.b * y.square(),
    "with a default": lambda self, y, x: y * self.counts["a"],
    "of a class of its own": lambda self, y, x: y * self.config.a + self.config["b"],
    "in an order of its own": lambda self, y, x: y * self.ordered["a"] + self.ordered["b"] * y.square(),
    "of an object": lambda self, y, x: y * self.thing.weights["a"],
    "in a tuple": lambda self, y, x: y * self.pair[0]["a"],
    "that others have, too": lambda self, y, x: y * self.weights["a"] + self.inner(y),
    "gone through": lambda self, y, x: sum((y**n * w for n, w in enumerate(self.list)), y),  # type: ignore[misc]
    "taken out": lambda self, y, x: y * dict(**self.weights)["a"] + next(iter(self.weights.values())),
    "unpacked": lambda self, y, x: (lambda a, b: y * a + b)(**self.weights),
    "compared": lambda self, y, x: y * max(0.3, self.weights.get("a", 1.0)) if self.list[1] < 0 else y,
    "computed": lambda self, y, x: (
        y * (0.5 * (1 + math.cos(math.pi * self.weights["a"]))) + y.abs() ** (2 + self.deep[3])
    ),
    "of NumPy": lambda self, y, x: y * self.number + (1 - self.number) * y.square() + y * math.exp(-self.number),
    "of NumPy, as a tensor": lambda self, y, x: y * torch.tensor(self.number),
    "of NumPy, alone": lambda self, y, x: torch.lerp(y, x, min(self.number, 1.0)) if self.number < 2 else y,
}


@pytest.mark.parametrize(("case", "change"), pairs(HELD, (_set, _replaced)))
def test_one_capture_for_all_numbers(case: str, change: Change, caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = _model(HELD[case]), _model(HELD[case])
    lowtide.rematerialize(planned, budget="100%", planner="greedy", dynamic=False)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        assert _steps(planned, change) == _steps(plain, change)
    assert caplog.text.count("is captured again") <= 2
    assert planned.forward.parts is None and not planned.forward.is_online
    with lowtide.checked(every=1):
        planned(rows()).backward()


def _counted(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.weights["a"] *= 0.9
    return y * self.weights["a"]


def _written_beside(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.weights["c"] = self.weights["a"]
    return y * self.weights["a"]


def _put_elsewhere(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.last = [self.weights]
    return y * self.weights["a"]


def _copied(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weights = copy.deepcopy(self.weights)
    return y * weights["a"] * len(str(self.list))


def _as_text(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * len(str(self.weights["a"])) + float(f"{self.list[1]:.2f}")


def _as_a_list(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * torch.tensor(self.list).sum() + y * torch.tensor([*self.weights.values()])[0]


def _in_order(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * sorted(self.list)[1] + max(self.weights, key=lambda name: self.weights[name]).count("a") * y.exp()


def _of_numpy(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * np.exp(self.number) + self.number.item() * y + np.clip(self.number, 0.2, 0.6)


def _pair(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.weights["a"] * (self.weights["a"] * self.list[1])


def _late(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _ReadsLate.apply(y, self.weights)
    return result + y * self.weights["b"]


def _hooked(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y * self.weights["a"]
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * self.weights["b"])
    return y


def _by_two_ways(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.space.a + y.square() * self.inner.space.a + self.inner.weights["a"]


def _by_type(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.weights["a"] if type(self.weights["a"]) is float else y.sin()


def _turned(model: Any, step: int) -> None:
    """Both numbers change."""
    _set(model, step)
    model.weights["b"] = 1.5 - 0.1 * step


def _reordered(model: Any, step: int) -> None:
    _turned(model, step)
    model.weights["c"] = model.weights.pop("b")
    model.weights["b"] = model.weights.pop("c")
    model.list.reverse()


def _other_types(model: Any, step: int) -> None:
    _turned(model, step)
    model.weights["a"] = [0.5, 2, np.float64(0.3), True][step % 4]
    model.list[1] = [1, 0.25][step % 2]


def _parted(model: Any, step: int) -> None:
    """A submodule's is another dictionary from some step on."""
    _turned(model, step)
    if step == 5:
        model.inner.weights, model.inner.space = dict(model.weights), copy.deepcopy(model.space)
    model.inner.weights["a"], model.inner.space.a = model.weights["a"] + (step >= 5), model.space.a + (step >= 5)


LESS_KNOWN: tuple[Compute, ...] = (
    _counted,
    _written_beside,
    _put_elsewhere,
    _copied,
    _as_text,
    _as_a_list,
    _in_order,
    _of_numpy,
    _pair,
    _late,
    _hooked,
    _by_two_ways,
    _by_type,
    *(HELD[name] for name in ("dictionary", "list", "that others have, too", "gone through", "unpacked", "of NumPy")),
)


@pytest.mark.parametrize(("compute", "change"), pairs(LESS_KNOWN, (_turned, _reordered, _other_types, _parted)))
def test_numbers_of_which_less_is_known(compute: Compute, change: Change) -> None:
    plain, planned = _model(compute), _model(compute)
    lowtide.rematerialize(planned, budget="100%", planner="greedy", dynamic=False)
    assert _steps(planned, change) == _steps(plain, change)


class _Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weights = nn.Linear(4, 4), {"a": 0.1}

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x).tanh() * self.weights["a"], self.weights, [self.weights["a"]]


def test_a_holder_that_is_returned() -> None:
    torch.manual_seed(0)
    model = _Returns()
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    for step in range(6):
        model.weights["a"] = 0.1 * step
        y, weights, numbers = model(rows())
        y.sum().backward()
        assert (weights["a"], numbers) == (0.1 * step, [0.1 * step])


class _Reports(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beta, self.gamma, self.step, self.rate = nn.Linear(4, 4), 0.1, 0.2, 0, np.float64(0.5)
        self.log: Any = None

    def forward(self, x: torch.Tensor, weight: float) -> Any:
        self.step += 1
        y = self.linear(x).tanh() * self.beta
        self.log = {"mean": y.detach().mean(), "beta": self.beta}
        logged = {"beta": self.beta, "more": [1 - self.gamma, self.beta * self.gamma, (self.step, self.rate * weight)]}
        return y, Thing(y=y, weight=weight), logged, max(self.gamma, 0.6)


def test_numbers_that_are_returned(caplog: pytest.LogCaptureFixture) -> None:
    """By themselves, computed, in containers and objects, and in an attribute that gets tensors."""
    plain, planned = (_Reports() for _ in range(2))
    planned.load_state_dict(plain.state_dict())
    lowtide.rematerialize(planned, budget="100%", planner="greedy", dynamic=False)
    found: list[list[Any]] = [[], []]
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for step in range(STEPS):
            for model, into in zip((plain, planned), found, strict=True):
                model.beta, model.gamma, model.rate = 0.1 * step, 1 - 0.1 * step, np.float64(step)
                y, thing, logged, largest = model(rows(), 0.3 * step)
                y.sum().backward()
                into.append((thing.y.tolist(), thing.weight, repr(logged), largest, model.log["beta"], model.step))
    assert found[0] == found[1]
    assert caplog.text.count("is captured again") <= 4
    assert planned.forward.parts is None and not planned.forward.is_online


def test_numbers_that_others_find_elsewhere() -> None:
    """In a variable of a function, which is not of the model's copy."""
    weights = {"a": 0.1}

    def compute(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * self.weights["a"] + y.square() * weights["a"]

    def change(model: Any, step: int) -> None:
        weights["a"] = 0.3 + step

    plain, planned = _model(compute), _model(compute)
    plain.weights = planned.weights = weights
    lowtide.rematerialize(planned, budget="100%", planner="greedy")
    assert _steps(planned, change) == _steps(plain, change)

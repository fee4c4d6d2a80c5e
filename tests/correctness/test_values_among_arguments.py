"""Plain values in containers and objects among the arguments, which are other ones in every call, beside eager."""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from tests.fuzz.changed import Reversed
from tests.support.beside import plain_and_planned

STEPS = 8


class _Pair(NamedTuple):
    rate: float
    name: str


@dataclass
class _Batch:
    """An object that holds tensors, and values beside them."""

    x: torch.Tensor
    rate: float = 1.0
    name: str = ""
    meta: list[dict[str, Any]] = field(default_factory=list)


class _Computes(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.first, self.second, self.compute = nn.Linear(4, 8), nn.Linear(8, 4), compute

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        return self.compute(self.second(torch.tanh(self.first(x))), given)


def _train(compute: Callable[[torch.Tensor, Any], Any], given: Callable[[int], Any], steps: int = STEPS) -> Any:
    """The planned model, which was as eager in each of the steps."""
    plain, planned = plain_and_planned(lambda: _Computes(compute), dynamic=False)
    for step in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        found = []
        for model in (plain, planned):
            model.zero_grad()
            own = given(step)
            result = model(x, own)
            loss, more = result if isinstance(result, tuple) else (result, None)
            loss.square().mean().backward()
            gradients = [one.grad.tolist() for one in model.parameters()]
            found.append(repr((loss.tolist(), more, gradients, _shown(own))))
        assert found[0] == found[1], step
    return planned


def _shown(value: Any) -> Any:
    """With the values of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: _shown(one) for key, one in value.items()} if isinstance(value, dict) else value


def _looks(given: Any) -> float:
    return 0.5 if os.path.basename(given["name"]).startswith("a") else 2.0


# What a call is given, what is done with it, and how often that is planned, before anything has changed included.
CASES: dict[str, tuple[Callable[[int], Any], Callable[[torch.Tensor, Any], Any], int]] = {
    "an item": (lambda s: {"kl": 0.1 * s}, lambda y, o: y * o["kl"], 2),
    "deep": (lambda s: {"a": {"b": [0.3, {"c": 0.2 * s}]}}, lambda y, o: y / (1 + o["a"]["b"][1]["c"]), 2),
    "a tuple": (lambda s: (0.1 * s, "x"), lambda y, o: y * o[0], 2),
    "a named tuple": (lambda s: _Pair(0.1 * s, f"{s}.png"), lambda y, o: y * o.rate, 2),
    "of NumPy's": (lambda s: {"alpha": 2 / (1 + np.exp(-0.1 * s)) - 1}, lambda y, o: Reversed.apply(y, o["alpha"]), 2),
    "NumPy's integers": (lambda s: {"k": np.arange(40)[s]}, lambda y, o: y * (o["k"] + 1) + o["k"] // 100, 2),
    "NumPy's short floats": (lambda s: {"k": np.float32(0.1) * s}, lambda y, o: o["k"] * y / (o["k"] + 1), 2),
    "converted": (lambda s: {"a": 0.1 * s, "n": 0.7 * s}, lambda y, o: y * float(o["a"]) + int(o["n"]), 2),
    "through NumPy": (lambda s: 0.1 * s, lambda y, o: y * np.exp(-o) * np.minimum(o, 0.5) / (1 + np.power(2, o)), 2),
    "clipped": (lambda s: (0.1 * s, s), lambda y, o: y * np.clip(o[0], 0.0, 0.3) + np.clip(o[1], 2, 5), 2),
    "in lists of tensors": (
        lambda s: (0.1 * s, s),
        lambda y, o: y * torch.tensor([o[0], 1, o[1]]).sum() + torch.as_tensor([o[1]] * 4, dtype=torch.float32),
        2,
    ),
    "an ordered dictionary": (lambda s: OrderedDict(a=0.1 * s, b=s), lambda y, o: y * o["a"], 2),
    "a default": (lambda s: defaultdict(float, a=0.1 * s), lambda y, o: y * o["a"], 2),
    "integer keys": (lambda s: {0: 0.1 * s, 1: 0.3}, lambda y, o: y * o[0] + o[1], 2),
    "an object": (lambda s: _Batch(torch.ones(4), 0.1 * s, f"{s}"), lambda y, o: y * o.rate + o.x, 2),
    "in an object": (lambda s: _Batch(torch.ones(4), meta=[{"id": s}]), lambda y, o: y * o.meta[0]["id"] + o.x, 2),
    "names": (lambda s: {"names": [f"{s}.png", "b.png"], "path": b"%d" % s}, lambda y, o: y, 2),
    "names returned": (lambda s: {"names": [f"{s}.png"]}, lambda y, o: (y, {"of": o["names"], "first": o["names"][0]}), 2),
    "one name of many": (lambda s: [f"{i}.png" if i else f"{s}" for i in range(3)], lambda y, o: y, 2),
    "names that come one by one": (lambda s: [f"{min(i, s)}" for i in range(STEPS)], lambda y, o: y, 2),
    "asked for its class": (lambda s: {"n": f"{s}"}, lambda y, o: y * 2 if isinstance(o["n"], str) else y, 2),
    "two branches": (lambda s: {"s": s}, lambda y, o: y.sin() if o["s"] > 4 else y.cos(), 3),
    "a count": (lambda s: {"s": s}, lambda y, o: y * 2 if o["s"] % 2 else y, 3),
    "computed with each other": (lambda s: {"a": 0.1 * s, "b": 1 + s}, lambda y, o: y * (o["a"] / o["b"]), 2),
    "returned": (lambda s: {"a": 0.1 * s}, lambda y, o: (y * o["a"], {"a": o["a"], "b": o["a"] + 1}), 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_plan_for_all_values(case: str, caplog: pytest.LogCaptureFixture) -> None:
    given, compute, plans = CASES[case]
    with caplog.at_level(logging.INFO, logger="lowtide"):
        planned = _train(compute, given)
        assert caplog.text.count("planned _Computes") <= plans
    assert planned.forward.parts is None and not planned.forward.is_online
    with lowtide.checked(every=1):
        planned(torch.ones(3, 4), given(STEPS))


def _tried(y: torch.Tensor, given: dict[str, Any]) -> Any:
    try:
        return getattr(y, given["name"])()
    except TypeError:
        return y


def _counts(y: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    given["calls"] = given["calls"] + 1
    return y * given["calls"]


def _puts(y: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    given["seen"], given["y"] = given["rate"] * 2, y
    return y * given["rate"]


def _caught(y: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    try:
        return y * int(given["name"])
    except ValueError:
        return y


# What is looked at in other ways: right in any case, however often it is planned.
LOOKED_AT: dict[str, tuple[Callable[[int], Any], Callable[[torch.Tensor, Any], Any]]] = {
    "the length of a name": (lambda s: {"name": "x" * (s // 2)}, lambda y, o: y * len(o["name"])),
    "a name that decides": (lambda s: {"name": f"{'ab'[s // 2 % 2]}.png"}, lambda y, o: y * _looks(o)),
    "a name that is equal": (lambda s: {"name": "ab"[s % 2]}, lambda y, o: y.sin() if o["name"] == "a" else y.cos()),
    "a name among others": (lambda s: {"name": "ab"[s % 2]}, lambda y, o: y.sin() if o["name"] in ("a", "c") else y),
    "a key": (lambda s: {"name": f"{s % 3}"}, lambda y, o: y * {"0": 1.0, "1": 2.0, "2": 3.0}[o["name"]]),
    "a part of a text": (lambda s: {"name": f"{s}"}, lambda y, o: (y, f"of {o['name']}")),
    "joined texts": (lambda s: {"names": [f"{s}", "b"]}, lambda y, o: (y, "+".join(o["names"]))),
    "an attribute by name": (lambda s: {"name": ("sin", "cos")[s % 2]}, lambda y, o: getattr(y, o["name"])()),
    "tried": (lambda s: {"name": ("sin", "cos")[s % 2]}, _tried),
    "a size": (lambda s: {"rows": 1 + s % 3}, lambda y, o: y[: o["rows"]]),
    "lengths": (lambda s: {"lengths": [1 + s % 3, 2, 3]}, lambda y, o: torch.cat([y[:n] for n in o["lengths"]])),
    "a converted text": (lambda s: {"name": f"{s}" if s % 3 else "none"}, _caught),
    "counted in place": (lambda s: {"calls": s}, _counts),
    "put beside": (lambda s: {"rate": 0.1 * s}, _puts),
    "another type": (lambda s: {"a": 0.1 * s if s % 2 else None}, lambda y, o: y if o["a"] is None else y * o["a"]),
    "whole numbers, too": (lambda s: {"a": 2 if s % 3 else 0.1 * s}, lambda y, o: y * o["a"]),
    "other keys": (lambda s: {"a": 0.1 * s} if s % 2 else {"b": 0.2 * s}, lambda y, o: y * sum(o.values())),
    "not a number": (lambda s: {"a": float("nan") if s > 5 else 0.1 * s}, lambda y, o: y + max(o["a"], 0.0)),
    "a switch": (lambda s: {"a": s % 2 == 0, "b": 0.1 * s}, lambda y, o: y * o["b"] if o["a"] is True else y),
    "a copy": (lambda s: {"a": 0.1 * s, "n": f"{s}"}, lambda y, o: y * copy.deepcopy(o)["a"]),
    "items": (lambda s: {"a": 0.1 * s, "n": 0.2}, lambda y, o: sum((y * v for v in o.values()), y)),
    "merged": (lambda s: {"a": 0.1 * s, "n": f"{s}"}, lambda y, o: y * {**o, "c": 1}["a"]),
    "formatted": (lambda s: {"a": 0.1 * s}, lambda y, o: (y * o["a"], f"{o['a']:.2f}")),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOKED_AT)
def test_values_that_are_looked_at(case: str) -> None:
    given, compute = LOOKED_AT[case]
    _train(compute, given)


def test_values_that_are_looked_at_leave_the_others_their_plan(caplog: pytest.LogCaptureFixture) -> None:
    def given(step: int) -> Any:
        return {"mode": ("sin", "cos")[step // 3 % 2], "kl": 0.1 * step, "names": [f"{step}"]}

    with caplog.at_level(logging.INFO, logger="lowtide"):
        _train(lambda y, o: getattr(y, o["mode"])() * o["kl"], given, 18)
    # The first, two before it is known what changes, one more for the other mode.
    assert caplog.text.count("planned _Computes") <= 4


def test_calls_that_wait_keep_their_values() -> None:
    def compute(y: torch.Tensor, given: Any) -> Any:
        return (y.exp() if given["step"] % 2 else y.sin()) * given["kl"], {"name": given["name"], "y": y.square()}

    plain, planned = plain_and_planned(lambda: _Computes(compute))
    for step in range(8):
        for model in (plain, planned):
            model.zero_grad()
            given = [
                {"kl": 0.1 * (step + call + 1), "step": step + call, "name": f"{step}-{call}"} for call in range(2)
            ]
            one, two = (model(torch.ones(3, 4) + call, given[call]) for call in range(2))
            assert (one[1]["name"], two[1]["name"]) == (f"{step}-0", f"{step}-1")
            (one[0] if step % 3 else one[1]["y"]).sum().backward()
            (two[0].sum() + two[1]["y"].sum()).backward()
        for one, two in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_what_is_given_stays_the_users() -> None:
    """Values are put into what the user has given, and into no copy of it."""

    def compute(y: torch.Tensor, given: Any) -> torch.Tensor:
        given["batch"].y = y
        return y * given["batch"].rate

    torch.manual_seed(0)
    planned = _Computes(compute)
    lowtide.rematerialize(planned, budget="100%", planner="greedy")
    for step in range(5):
        batch = _Batch(torch.ones(4), 0.1 * step)
        result = planned(torch.ones(3, 4), {"batch": batch})
        assert torch.equal(result, batch.y * (0.1 * step))  # type: ignore[attr-defined]
        result.sum().backward()


def test_a_value_that_is_looked_at_in_a_call_in_which_another_is_not_as_usual() -> None:
    """Its program is made once for what it is, and once more in the same call for what a check says."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
            h = self.layer(x) * len(options["name"]) * options["rate"]
            return h.square().sum() * (2 if int((x + 0 * h.detach() > 0).sum()) > 7 else 1)

    plain, planned = plain_and_planned(Model)
    for step in range(STEPS):
        x = torch.full((4, 4), 1.5 if step >= 2 else -0.5)
        options = {"name": "a" * (1 + step // 2), "rate": 0.5 + step}
        losses = [model(x, dict(options)) for model in (plain, planned)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert torch.equal(plain.layer.weight.grad, planned.layer.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float64, int, float])
def test_tensors_that_are_made_of_a_value_have_its_type(kind: type) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, number: Any) -> Any:
            made = torch.tensor(number)
            return (self.layer(x) * made).square().sum(), made // 2, torch.as_tensor(number)

    plain, planned = plain_and_planned(Model)
    for step in range(STEPS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        (one, *theirs), (other, *ours) = plain(x, kind(step + 1)), planned(x, kind(step + 1))
        assert torch.equal(one, other)
        assert [(each.dtype, each.item()) for each in theirs] == [(each.dtype, each.item()) for each in ours]
        other.backward()

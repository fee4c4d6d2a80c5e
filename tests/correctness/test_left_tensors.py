"""What a forward pass asks of the attributes that it leaves tensors in, beside the values of these: whether there are any yet,
how many, and what else is there. It is a condition of the program, and the next call finds it otherwise."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.beside import assert_same_steps, plain_and_planned
from tests.support.wide import pairs

Compute = Callable[[Any, torch.Tensor], Any]
STEPS = 7


class _Leaves(nn.Module):
    """Its loss is what ``compute(self, h)`` makes of its hidden rows; ``between(self, step)`` comes before each step."""

    def __init__(self, compute: Compute, between: Callable[[Any, int], None] = lambda self, step: None) -> None:
        super().__init__()
        self.linear, self.compute, self.between = nn.Linear(8, 8), compute, between
        self.seen: Any = None
        self.log: dict[str, Any] = {}
        self.config: dict[str, Any] = {"scale": 2.0, "hidden": None, "deep": {"rate": 0.5, "hidden": None}}
        self.list: list[Any] = []
        self.last: deque[Any] = deque(maxlen=3)
        self.order: OrderedDict[str, Any] = OrderedDict(a=None, b=None)
        self.state = SimpleNamespace(hidden=None, count=0, scale=2.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, torch.tanh(self.linear(x)))


def _whether_there_is_one(self: Any, h: torch.Tensor) -> Any:
    factor = 2 if self.seen is None else 1
    self.seen = h.detach().mean()
    return factor * h.square().mean()


def _whether_it_has_the_attribute(self: Any, h: torch.Tensor) -> Any:
    factor = 1 if hasattr(self, "made") else 2
    self.made = h.detach().mean()
    return factor * h.square().mean()


def _whether_it_is_a_tensor(self: Any, h: torch.Tensor) -> Any:
    factor = 1 if isinstance(self.seen, torch.Tensor) else 2
    self.seen = h.detach().mean(0)
    return factor * h.square().mean()


def _of_a_layer(self: Any, h: torch.Tensor) -> Any:
    factor = 2 if getattr(self.linear, "seen", None) is None else 1
    self.linear.seen = h.detach().mean()
    return factor * h.square().mean()


def _by_its_name(self: Any, h: torch.Tensor) -> Any:
    factor = 1 + sum(hasattr(self, f"row{number}") for number in range(3))
    for number in range(3):
        setattr(self, f"row{number}", h.detach()[number])
    return factor * h.square().mean()


def _its_shape(self: Any, h: torch.Tensor) -> Any:
    factor = 2 if self.seen is None or self.seen.shape != h.shape else 1
    self.seen = h.detach() if self.seen is None else h.detach()[:3]
    return factor * h.square().mean()


def _its_key(self: Any, h: torch.Tensor) -> Any:
    factor = 1 if "hidden" in self.log else 2
    self.log["hidden"] = h.detach().mean()
    return factor * h.square().mean()


def _beside_a_setting(self: Any, h: torch.Tensor) -> Any:
    self.config["hidden"] = h.detach().mean()
    self.config["deep"]["hidden"] = h.detach().sum()
    return h.square().mean() * self.config["scale"] * self.config["deep"]["rate"]


def _in_lists_of_lists(self: Any, h: torch.Tensor) -> Any:
    if len(self.list) < 2:
        self.list.append([h.detach().sum()])
    self.list[0][:] = [h.detach().mean(), *self.list[0][:1]]
    return h.square().mean() * len(self.list)


def _beside_an_attribute(self: Any, h: torch.Tensor) -> Any:
    factor = 2 if self.state.hidden is None else 1
    self.state.hidden = h.detach().mean()
    return h.square().mean() * self.state.scale * factor


def _whether_it_is_empty(self: Any, h: torch.Tensor) -> Any:
    if not self.list:
        self.list.append(h.detach().mean())
        return 2 * h.square().mean()
    self.list[0] = h.detach().mean()
    return h.square().mean()


def _how_many(self: Any, h: torch.Tensor) -> Any:
    self.list.append(h.detach().mean())
    return h.square().mean() * (1 if len(self.list) < 4 else 2)


def _how_full(self: Any, h: torch.Tensor) -> Any:
    self.last.append(h.detach().mean())
    return h.square().mean() * (1 if len(self.last) < 3 else 2)


def _in_which_order(self: Any, h: torch.Tensor) -> Any:
    first = next(iter(self.order))
    self.order[first] = h.detach().mean()
    self.order.move_to_end(first)
    return h.square().mean() * (1 if first == "a" else 2)


def _what_was_there(self: Any, h: torch.Tensor) -> Any:
    before, self.log = dict(self.log), {"hidden": h.detach().mean()}
    return h.square().mean(), before


def _what_was_last(self: Any, h: torch.Tensor) -> Any:
    before, self.seen = self.seen, h.detach().mean()
    return h.square().mean(), before


def _what_was_in_an_object(self: Any, h: torch.Tensor) -> Any:
    before, self.state.hidden = self.state.hidden, h.detach().mean()
    return h.square().mean(), [before]


ASKED = [
    _of_a_layer, _by_its_name, _whether_there_is_one, _whether_it_has_the_attribute, _whether_it_is_a_tensor, _its_shape,
    _its_key, _beside_a_setting, _in_lists_of_lists, _beside_an_attribute, _whether_it_is_empty, _how_many, _how_full,
    _in_which_order, _what_was_there, _what_was_last, _what_was_in_an_object,
]  # fmt: skip


def _nothing(self: Any, step: int) -> None:
    pass


def _forgotten(self: Any, step: int) -> None:
    """As a user resets what was recorded."""
    if step % 3 == 2:
        self.seen = self.config["hidden"] = self.state.hidden = None
        self.log.clear()
        self.list.clear()
        self.last.clear()


def _set_otherwise(self: Any, step: int) -> None:
    self.config["scale"] = self.state.scale = 2.0 + step // 3
    self.config["deep"]["rate"] = 0.5 + step // 4


def _step(model: Any, number: int) -> Any:
    model.zero_grad()
    model.between(model, number)
    returned = model(torch.randn(6, 8))
    (returned[0] if isinstance(returned, tuple) else returned).backward()
    own = [value for name, value in vars(model).items() if name.startswith(("made", "row"))]
    state = vars(model.state), own, getattr(model.linear, "seen", None)
    return returned, model.seen, model.log, model.config, model.list, model.last, model.order, state


@pytest.mark.parametrize(("compute", "between"), pairs(ASKED, (_nothing, _forgotten, _set_otherwise)))
def test_what_is_asked_of_tensors_that_are_left(compute: Compute, between: Callable[[Any, int], None]) -> None:
    assert_same_steps(*plain_and_planned(lambda: _Leaves(compute, between)), _step, STEPS)


def _only_left(self: Any, h: torch.Tensor) -> Any:
    self.log["hidden"] = self.seen = h.detach().mean()
    self.list.append(h.detach().sum())
    return h.square().mean()


def _read_afterwards(self: Any, h: torch.Tensor) -> Any:
    self.seen = h * 2
    return self.seen.square().mean()


@pytest.mark.parametrize("compute", [_only_left, _read_afterwards])
def test_what_is_not_asked_is_no_condition(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(lambda: _Leaves(compute))
    caplog.set_level(logging.INFO, "lowtide")
    assert_same_steps(plain, planned, _step, STEPS)
    assert "is captured again" not in caplog.text


@pytest.mark.parametrize("number", [False, True])
def test_a_container_that_two_attributes_have_in_common_until_they_do_not(number: bool) -> None:
    """What a pass puts into the one is in the other, as long as that is the same."""

    def compute(self: Any, h: torch.Tensor) -> Any:
        self.log["size"] = h.mean().item() if number else h.detach().mean()
        return h.square().mean(), self.linear.log["size"]

    def between(self: Any, step: int) -> None:
        if step == 0:
            self.log["size"], self.linear.log = 0.5, self.log
        if step in (3, 5):
            self.linear.log = dict(self.log) if step == 3 else self.log

    def step(model: Any, number: int) -> Any:
        model.between(model, number)
        loss, size = model(torch.randn(4, 8))
        loss.backward()
        return loss, size

    plain, planned = plain_and_planned(lambda: _Leaves(compute, between))
    assert_same_steps(plain, planned, step, STEPS)

"""Variables outside of the model that its code reads, changed after the plan was made: the next call follows, as in eager."""

from __future__ import annotations

import argparse
import copy
import logging
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide

_number = 1.0
_settings = argparse.Namespace(rate=0.5, steps=0, inner=types.SimpleNamespace(power=2))
_table: dict[str, Any] = {"scale": 1.0, "deeper": [1.0]}
_function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
_offset = torch.zeros(8)
_unread = 0
_seen: list[int] = []
_calls = 0


class _Constants:
    bias = 0.25

    def __init__(self) -> None:
        self._hidden = 1.0

    @property
    def hidden(self) -> float:
        return self._hidden + self.bias


_constants = _Constants()
_library = types.ModuleType("a_module_of_the_user")
_CODE = "gain = 1.0\n\ndef gained(x):\n    return x * gain\n"
exec(_CODE, vars(_library))  # as an imported file has it


def _helper(x: torch.Tensor, settings: Any = _settings) -> torch.Tensor:
    return x * _table["scale"] + _table["deeper"][0] * settings.rate


def _scaled(scale: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    def apply(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change(to: float) -> None:
        nonlocal scale
        scale = to

    return apply, change


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scaled, self.change = _scaled(1.0)
        self.shifted = lambda x: x + _constants.hidden
        self.head.register_forward_hook(lambda module, args, result: result * _settings.inner.power)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _seen.append(0)
        self._count()
        y = _function(self.linear(x)) * _number + _offset
        y = self.head(_helper(self.scaled(y)))
        return _library.gained(self.shifted(y)).square().mean()

    def _count(self) -> None:
        global _calls
        _calls += 1


def _anneal(model: Any) -> None:
    global _number
    _number = 2.0


def _configure(model: Any) -> None:
    _settings.rate = 0.75


def _configure_deeper(model: Any) -> None:
    _settings.inner.power = 3


def _fill(model: Any) -> None:
    _table["deeper"][0] = 2.0


def _exchange(model: Any) -> None:
    global _function
    _function = F.relu


def _other_tensor(model: Any) -> None:
    global _offset
    _offset = torch.ones(8)


def _close(model: Any) -> None:
    model.change(3.0)


def _other_gain(model: Any) -> None:
    _library.gain = 4.0


def _other_class(model: Any) -> None:
    _Constants.bias = 0.5


def _other_property(model: Any) -> None:
    _constants._hidden = 2.0


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    global _number, _function, _offset
    yield
    _number, _function, _offset = 1.0, torch.tanh, torch.zeros(8)
    _settings.rate, _settings.inner.power, _table["deeper"][0] = 0.5, 2, 1.0
    _Constants.bias, _constants._hidden, _library.gain = 0.25, 1.0, 1.0


def _said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.message for record in caplog.records if record.name.startswith("lowtide"))


def _equal(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> bool:
    found = []
    for one in (model, plain):
        one.zero_grad()
        loss = one(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in one.parameters() if p.grad is not None)])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_anneal, "_number is 2.0"),
        (_configure, "_settings.rate is 0.75"),
        (_configure_deeper, "_settings.inner.power is 3"),
        (_fill, "_table\\[.deeper.\\]\\[0\\] is 2.0"),
        (_exchange, "_function is another"),
        (_other_tensor, "_offset is another Tensor"),
        (_close, "scale in .*_scaled.<locals>.* is 3.0"),
        (_other_gain, "a_module_of_the_user.gain is 4.0"),
        (_other_class, "_Constants.bias is 0.5"),
        (_other_property, "_constants._hidden is 2.0"),
    ],
)
def test_variables_are_followed(change: Callable[[Any], None], said: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, x = _Model(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    model.scaled, model.change = _scaled(1.0)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    assert _equal(model, plain, x)
    change(model)
    if change is _close:
        change(plain)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        assert _equal(model, plain, x)
        assert _equal(model, plain, x)
    assert _said(caplog).count("is captured again") == 1, _said(caplog)
    assert re.search(said, _said(caplog)), _said(caplog)
    assert len(lowtide.plans(model)) == 2


def test_what_is_not_named_is_of_no_consequence(caplog: pytest.LogCaptureFixture) -> None:
    """Nor what the forward pass writes itself, nor another shape's first call."""
    global _unread, _calls
    torch.manual_seed(0)
    plain, x = _Model(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    assert _equal(model, plain, x) and _equal(model, plain, x[:2])
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for _ in range(3):
            _unread += 1
            _calls += 1
            _settings.steps += 1
            _seen.append(0)
            assert _equal(model, plain, x) and _equal(model, plain, x[:2])
    assert not _said(caplog)

"""What ``forward`` reaches both through the model and by a variable or an argument, and writes: no copy shows both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import lowtide
from tests.fuzz.changed import Computes, Thing, rows

_THING = Thing(step=0, scale=1.0, inner=Thing(scale=1.0))
_TABLE: dict[str, Any] = {"step": 0, "scale": 1.0}
_ARRAY = np.ones((2, 2))
_MODEL: list[Any] = []
_ASKED: dict[Any, float] = {}


class _Model(Computes):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__(compute)
        self.thing, self.table, self.array, self.scale = _THING, _TABLE, _ARRAY, 1.0
        self.register_buffer("total", torch.zeros(4))


def _counts(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.thing.step += 1
    return y * 2 if _THING.step > 3 else y


def _counts_outside(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _THING.step += 1
    return y * 2 if self.thing.step > 3 else y


def _sets(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.thing.inner.scale = 3.0
    return y * _THING.inner.scale


def _sets_outside(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _THING.scale += 0.5
    return y * self.thing.scale


def _both(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _TABLE["scale"] += 1
    self.table["scale"] += 1
    return y * _TABLE["scale"]


def _puts_tensor(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.table["kept"] = y
    made: torch.Tensor = y * _TABLE["kept"]
    return made


def _sets_argument(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    given.scale = 4.0
    return y * self.thing.scale


def _reads_argument(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.thing.scale = 4.0
    return y * given.scale


def _model_in_variable(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.scale = 2.0
    return y * _MODEL[-1].scale


def _buffer_in_variable(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.total.add_(1)
    made: torch.Tensor = y * _MODEL[-1].total
    return made


def _only_reads(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    y = y * self.array.sum() * _ARRAY.mean()
    return y * self.thing.scale * _THING.inner.scale * given.scale * _MODEL[-1].scale


def _fills_array(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _ARRAY[0, 0] = 3.0
    made: torch.Tensor = y * self.array.sum()
    return made


WRITES = [
    _counts, _counts_outside, _sets, _sets_outside, _both, _puts_tensor, _sets_argument, _reads_argument, _model_in_variable,
    _buffer_in_variable, _fills_array,
]  # fmt: skip


class _Whole(nn.Module):
    """Runs in parts where its part cannot be planned."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.part = _Model(compute)

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        loss: torch.Tensor = self.part(x, given)
        return loss


def _made(compute: Callable[..., torch.Tensor]) -> _Whole:
    vars(_THING).update(step=0, scale=1.0)
    _THING.inner.scale = 1.0
    _TABLE.clear()
    _TABLE.update(step=0, scale=1.0)
    _ARRAY[:] = 1.0
    torch.manual_seed(0)
    whole = _Whole(compute)
    _MODEL[:] = [whole.part]
    return whole


def _left() -> Any:
    return _THING.step, _THING.scale, _THING.inner.scale, _TABLE["scale"]


def _steps(whole: _Whole) -> list[Any]:
    found = []
    for step in range(6):
        whole.zero_grad()
        loss = whole(rows() + step, _THING)
        loss.backward()
        found.append((loss.item(), whole.part.linear.weight.grad.tolist(), whole.part.total.tolist(), _left()))
    return found


@pytest.mark.parametrize("compute", WRITES)
def test_writes_are_refused(compute: Callable[..., torch.Tensor]) -> None:
    expected, model = _steps(_made(compute)), _made(compute)
    before = _left()
    with pytest.raises(lowtide.CaptureError):
        lowtide.rematerialize(model, (rows(), _THING), budget="100%", on_capture_error="error")
    assert _left() == before
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    assert _steps(model) == expected and not lowtide.plans(model)


def test_what_is_only_read_is_planned() -> None:
    expected, model = _steps(_made(_only_reads)), _made(_only_reads)
    lowtide.rematerialize(model, budget="100%", planner="keep-all", on_capture_error="error")
    assert _steps(model) == expected and len(lowtide.plans(model)) == 1
    _THING.inner.scale = model.part.scale = 2.0
    assert torch.equal(model(rows(), _THING), _Whole.forward(model, rows(), _THING)) and len(lowtide.plans(model)) == 2


class _Blocks(nn.Module):
    """Computes with what ``ask(block, given)`` says of each block."""

    def __init__(self, ask: Callable[[Any, Any], float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        self.ask = ask

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.ask(block, given)
        return x.square().sum()


def _hooked(ask: Callable[[Any, Any], float]) -> _Blocks:
    """A hook asks, for which module it is called."""
    model = _Blocks(lambda block, given: 1.0)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, result: result * ask(module, _MODEL))
    return model


ASKS: dict[str, Callable[[Any, Any], float]] = {
    "which it is": lambda block, given: 2.0 if block is _MODEL[0] else 1.0,
    "whether it is in a list": lambda block, given: 2.0 if block in _MODEL else 1.0,
    "what it has in a dictionary": lambda block, given: _ASKED.get(block, 1.0),
    "what a weight of it has in a dictionary": lambda block, given: _ASKED.get(block[0].weight, 1.0),
    "what its id has in a dictionary": lambda block, given: _ASKED.get(id(block), 1.0),
    "what the id of a weight has in a dictionary": lambda block, given: _ASKED.get(id(block[0].weight), 1.0),
    "its hash": lambda block, given: 2.0 if hash(block) == hash(_MODEL[0]) else 1.0,
    "whether it is an argument": lambda block, given: 2.0 if given is block else 1.0,
    "whether it is among the arguments": lambda block, given: 2.0 if block in given else 1.0,
}


def _asking_steps(model: _Blocks, ask: str) -> list[Any]:
    found = []
    for chosen in (0, 0, 1, 1, 0):
        _MODEL[:] = [model.blocks[chosen]]
        _ASKED.clear()
        key: Any = model.blocks[chosen]
        key = key[0].weight if "weight" in ask else key
        _ASKED[id(key) if " id " in ask else key] = 3.0
        model.zero_grad()
        loss = model(rows(), [*_MODEL] if "among" in ask else _MODEL[0])
        loss.backward()
        found.append((loss.item(), *(parameter.grad.tolist() for parameter in model.parameters())))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("make", "ask"), [*((_Blocks, ask) for ask in ASKS), *((_hooked, ask) for ask in ASKS if "argument" not in ask)]
)
def test_modules_are_told_apart(make: Callable[..., _Blocks], ask: str) -> None:
    """By what is no copy: such a model runs in parts, but where only numbers are asked for."""
    torch.manual_seed(0)
    expected = _asking_steps(make(ASKS[ask]), ask)
    torch.manual_seed(0)
    model = lowtide.rematerialize(make(ASKS[ask]), budget="100%", planner="keep-all")
    assert _asking_steps(model, ask) == expected
    assert not {"id", "hash"} & globals().keys()


def test_a_module_by_a_variable_alone_is_planned() -> None:
    """Of which is read what it has."""
    torch.manual_seed(0)
    model = _Blocks(lambda block, given: _MODEL[0][0].out_features / 8)
    _MODEL[:] = [model.blocks[0]]
    lowtide.rematerialize(model, (rows(), None), budget="100%", planner="keep-all", on_capture_error="error")
    assert torch.equal(model(rows(), None), _Blocks.forward(model, rows(), None))


class _Square(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() if weight.shape[0] == weight.shape[1] else weight * 2


def test_a_parametrized_layer_is_planned_where_code_compares() -> None:
    """Whose property closes over the layer itself, of which it takes the ``id``."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", _Square())
    expected = model(rows())
    lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")
    assert torch.equal(model(rows()), expected)


class _Policy:
    def __init__(self, scale: float) -> None:
        self.scale = scale


_MISSING, _SOFT, _HARD = object(), _Policy(1.0), _Policy(2.0)
_WEIGHTS = {_SOFT: 1.0, _HARD: 3.0}
CHOICES: dict[str, tuple[Callable[[Any], float], list[Any]]] = {
    "a mark": (lambda one: 2.0 if one is _MISSING else 1.0, [_MISSING, None]),
    "an object": (lambda one: one.scale if one is _HARD else 5.0, [_SOFT, _HARD]),
    "a key": (lambda one: _WEIGHTS.get(one, 7.0), [_HARD, _SOFT]),
    "a list": (lambda one: 2.0 if one is _MODEL else 1.0, [_MODEL, []]),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_objects_are_told_apart(choice: str) -> None:
    """An attribute is the very object of a variable, or another one."""
    ask, values = CHOICES[choice]
    found = []
    for planned in (False, True):
        _MODEL.clear()
        torch.manual_seed(0)
        model = _Blocks(lambda block, given: ask(block.chosen))
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        for value in (*values, *values):
            for block in model.blocks:
                block.chosen = value
            loss = model(rows(), None)
            loss.backward()
            found.append((loss.item(), model.blocks[0][0].weight.grad.tolist()))  # type: ignore[index]
    assert found[:4] == found[4:] and found[0] != found[1]

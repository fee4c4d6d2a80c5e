"""Row: arguments and results of classes that are registered with ``torch.utils._pytree`` by functions that do not keep all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import lowtide


class _Batch:
    def __init__(self, x: torch.Tensor, scale: float = 1.0) -> None:
        self.x, self.scale = x, scale


class _Slotted:
    __slots__ = ("scale", "x")

    def __init__(self, x: torch.Tensor, scale: float = 1.0) -> None:
        self.x, self.scale = x, scale


@dataclass(frozen=True)
class _Frozen:
    x: torch.Tensor
    scale: float = 1.0


class _Listed(list[torch.Tensor]):
    def __init__(self, x: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__([x])
        self.x, self.scale = x, scale


class _Named(dict[str, torch.Tensor]):
    def __init__(self, x: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__(x=x)
        self.x, self.scale = x, scale


@pytest.fixture(params=[_Batch, _Slotted, _Frozen, _Listed, _Named])
def kind(request: pytest.FixtureRequest) -> Any:
    kind = request.param
    pytree.register_pytree_node(kind, lambda one: ([one.x], None), lambda held, _: kind(*held))
    yield kind
    pytree._deregister_pytree_node(kind)


class _Scaled(nn.Module):
    def __init__(self, result: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.result = nn.Linear(16, 64), nn.Linear(64, 16), result

    def forward(self, batch: Any) -> Any:
        return self.result(batch, self.last((self.first(batch.x).tanh() * batch.scale).tanh()))


def _same_kind(batch: Any, y: torch.Tensor) -> Any:
    return type(batch)(y, batch.scale + 5)


@pytest.mark.parametrize("result", [lambda _, y: y, _same_kind], ids=["tensor", "same kind"])
def test_all_that_an_object_knows_is_given_and_returned(kind: Any, result: Any) -> None:
    model = _Scaled(result)
    eager, x = copy.deepcopy(model), torch.randn(32, 16)
    lowtide.rematerialize(model, (kind(x, 2.0),), budget="90%")
    for scale in (2.0, 3.0, 2.0, 1.0):
        losses = []
        for one in (model, eager):
            one.zero_grad()
            y = one(kind(x, scale))
            if result is _same_kind:
                assert type(y) is kind and y.scale == scale + 5
                y = y.x
            y.square().sum().backward()
            losses.append(y)
        assert torch.equal(*losses)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert lowtide.plans(model)
    lowtide.restore(model)


class _Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, batch: Any) -> torch.Tensor:
        batch.hidden = self.first(batch.x).tanh()
        return self.last(batch.hidden.tanh())


def test_what_is_written_into_such_an_argument_is_there_afterwards() -> None:
    pytree.register_pytree_node(_Batch, lambda one: ([one.x], None), lambda held, _: _Batch(*held))
    try:
        model, x = _Writing(), torch.randn(32, 16)
        eager = copy.deepcopy(model)
        lowtide.rematerialize(model, (_Batch(x),), budget="90%")
        for _ in range(3):
            ours, theirs = _Batch(x, 1.5), _Batch(x, 1.5)
            assert torch.equal(model(ours), eager(theirs))
            assert torch.equal(ours.hidden, theirs.hidden)  # type: ignore[attr-defined]
        assert model.forward.parts is None
    finally:
        pytree._deregister_pytree_node(_Batch)

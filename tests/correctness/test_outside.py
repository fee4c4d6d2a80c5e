"""Tensors that a forward pass keeps outside of the model: caches of constants, lists of losses."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

Cached = Callable[[int], torch.Tensor]
_TABLES: dict[int, torch.Tensor] = {}
_LOSSES: list[torch.Tensor] = []
_variable: torch.Tensor | None = None


def _made(size: int) -> torch.Tensor:
    return torch.arange(size) * 1.0


def _in_global(size: int) -> torch.Tensor:
    if size not in _TABLES:
        _TABLES[size] = _made(size)
    return _TABLES[size]


def _in_variable(size: int) -> torch.Tensor:
    global _variable
    if _variable is None:
        _variable = _made(size)
    return _variable


def _in_default(size: int, tables: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if size not in tables:
        tables[size] = _made(size)
    return tables[size]


def _in_function(size: int) -> torch.Tensor:
    if not hasattr(_in_function, "table"):
        _in_function.table = _made(size)  # type: ignore[attr-defined]
    table: torch.Tensor = _in_function.table  # type: ignore[attr-defined]
    return table


class _Tables:
    table: torch.Tensor | None = None
    tables: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, size: int) -> torch.Tensor:
        if cls.table is None:
            cls.table = _made(size)
        return cls.table

    def entry(self, size: int) -> torch.Tensor:
        if size not in self.tables:
            self.tables[size] = _made(size)
        return self.tables[size]


_OBJECT: Any = type("_Object", (), {})()
_OBJECT.tables = {}


def _in_object(size: int) -> torch.Tensor:
    if size not in _OBJECT.tables:
        _OBJECT.tables[size] = _made(size)
    table: torch.Tensor = _OBJECT.tables[size]
    return table


def _forget() -> None:
    global _variable
    _variable, _Tables.table = None, None
    for holder in (_TABLES, _Tables.tables, _OBJECT.tables, _in_default.__defaults__[0], _in_function.__dict__):  # type: ignore[index]
        holder.clear()


def _is_empty() -> bool:
    holders = (_TABLES, _Tables.tables, _OBJECT.tables, _in_default.__defaults__[0], _in_function.__dict__)  # type: ignore[index]
    return _variable is None and _Tables.table is None and not any(holders)


class _Model(nn.Module):
    def __init__(self, cached: Cached) -> None:
        super().__init__()
        self.first, self.second, self.cached = nn.Linear(8, 8), nn.Linear(8, 8), cached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu() * self.cached(8)).square().mean()


class _WithGlobal(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu() * _CACHES[self.cached](8)).square().mean()


_CACHES: dict[Any, Cached] = {
    "a global dictionary": lambda size: _in_global(size),
    "a global variable": lambda size: _in_variable(size),
    "a default argument": lambda size: _in_default(size),
    "a function's attribute": lambda size: _in_function(size),
    "a class attribute": lambda size: _Tables.of(size),
    "a dictionary of a class": lambda size: _Tables().entry(size),
    "an object": lambda size: _in_object(size),
}


@pytest.fixture(autouse=True)
def _forgetful() -> Any:
    _forget()
    yield
    _forget()


@pytest.mark.parametrize("cache", _CACHES)
def test_caches_that_the_first_call_fills(cache: str) -> None:
    """Refused while they are empty, with nothing of the trace left in them; a call of the user's fills them."""
    torch.manual_seed(0)
    plain = _WithGlobal(cache)  # type: ignore[arg-type]
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    with pytest.raises(lowtide.CaptureError, match=r"keeps tensors outside of the model .*call the model once before"):
        lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    assert _is_empty()
    model(x)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for one in (plain, model):
        one(x).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


class _Collecting(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        _LOSSES.append(h.square().mean())
        return self.second(h).square().mean()


def test_losses_in_a_global_list() -> None:
    """They would be missing from planned calls; the list is left alone."""
    earlier = torch.zeros(())
    _LOSSES[:] = [earlier]
    with pytest.raises(
        lowtide.CaptureError, match=r"outside of the model \(tests\.correctness\.test_outside\._LOSSES\)"
    ):
        lowtide.rematerialize(_Collecting(_made), (torch.randn(4, 8),), budget="100%")
    assert len(_LOSSES) == 1 and _LOSSES[0] is earlier


class _Callback(_Model):
    def __init__(self, keep: Any) -> None:
        super().__init__(_made)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        self.keep(h.mean())
        return self.second(h).square().mean()


class _Passing(_Model):
    def forward(self, x: torch.Tensor, into: Any, put: Callable[[Any, torch.Tensor], None]) -> torch.Tensor:
        h = self.first(x).relu()
        put(into, h.mean())
        return self.second(h).square().mean()


@pytest.mark.parametrize("bound", [False, True])
def test_a_callback_that_keeps_tensors(bound: bool) -> None:
    kept: list[torch.Tensor] = []
    model = _Callback(kept.append if bound else lambda tensor: kept.append(tensor))
    with pytest.raises(lowtide.CaptureError, match=r"outside of the model \(.*_Callback\.keep\)"):
        lowtide.rematerialize(model, (torch.randn(4, 8),), budget="100%")
    assert not kept


@pytest.mark.parametrize("kind", ["a queue", "a list of an object", "an object in an object", "a callback"])
def test_arguments_that_keep_tensors(kind: str) -> None:
    kept: list[torch.Tensor] = []
    queue: collections.deque[torch.Tensor] = collections.deque()
    inner, outer = SimpleNamespace(value=None), SimpleNamespace(kept=kept)
    outer.inner = inner
    given: dict[str, tuple[Any, Callable[[Any, torch.Tensor], None]]] = {
        "a queue": (queue, lambda into, tensor: into.append(tensor)),
        "a list of an object": (outer, lambda into, tensor: into.kept.append(tensor)),
        "an object in an object": (outer, lambda into, tensor: setattr(into.inner, "value", tensor)),
        "a callback": (kept.append, lambda into, tensor: into(tensor)),
    }
    with pytest.raises(lowtide.CaptureError, match="adds to a list, a dict or an object among its arguments"):
        lowtide.rematerialize(_Passing(_made), (torch.randn(4, 8), *given[kind]), budget="100%")
    assert not kept and not queue and inner.value is None

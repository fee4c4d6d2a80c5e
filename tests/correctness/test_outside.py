"""Tensors that a forward pass keeps outside of the model: caches of constants, lists of losses."""

from __future__ import annotations

import collections
import copy
import functools
import types
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


_MODULE: Any = types.ModuleType("a_module_of_the_user")
_CODE = """
tables = {}

def entry(size, made):
    if size not in tables:
        tables[size] = made(size)
    return tables[size]
"""
exec(_CODE, vars(_MODULE))  # as an imported file has it


def _forget() -> None:
    global _variable
    _variable, _Tables.table = None, None
    of_objects = (_Tables.tables, _OBJECT.tables, _MODULE.tables)
    for holder in (_TABLES, *of_objects, _in_default.__defaults__[0], _in_function.__dict__):  # type: ignore[index]
        holder.clear()


class _Model(nn.Module):
    def __init__(self, cached: Cached) -> None:
        super().__init__()
        self.first, self.second, self.cached = nn.Linear(8, 8), nn.Linear(8, 8), cached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu() * self.cached(8)).square().mean()


class _WithGlobal(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = _CACHES[self.cached](x.shape[-1])
        return self.second(self.first(x).relu() * table.sum() + table.roll(1)).square().mean()


_CACHES: dict[Any, Cached] = {
    "a global dictionary": lambda size: _in_global(size),
    "a global variable": lambda size: _in_variable(size),
    "a default argument": lambda size: _in_default(size),
    "a function's attribute": lambda size: _in_function(size),
    "a class attribute": lambda size: _Tables.of(size),
    "a dictionary of a class": lambda size: _Tables().entry(size),
    "an object": lambda size: _in_object(size),
    "a module": lambda size: _MODULE.entry(size, _made),
}


@pytest.fixture(autouse=True)
def _forgetful() -> Any:
    _forget()
    yield
    _forget()


@pytest.mark.parametrize("cache", _CACHES)
def test_constants_that_the_first_call_keeps(cache: str) -> None:
    """They are there after the model was captured, as after a call, for eager calls and for those of other shapes."""
    torch.manual_seed(0)
    plain = _WithGlobal(cache)  # type: ignore[arg-type]
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    table = _CACHES[cache](8)
    assert type(table) is torch.Tensor and torch.equal(table, torch.arange(8) * 1.0)
    for rows in (4, 3, 4):
        for one in (plain, model):
            one(x[:rows]).backward()
        assert _CACHES[cache](8) is table
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def test_functions_that_remember_what_they_returned() -> None:
    """Nothing of the trace stays in ``functools.lru_cache``; the next eager call is handed a tensor with data."""
    torch.manual_seed(0)
    remembered = functools.lru_cache(_made)
    plain = _Model(remembered)
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    assert remembered.cache_info().currsize == 0
    for one in (plain, model):
        one(x).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


class _OfSize(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        mask = self.cached(len(x))
        return self.second((h @ h.T).masked_fill(mask, 0.0) @ h).square().mean()


def _masks(size: int) -> torch.Tensor:
    if size not in _TABLES:
        mask = torch.ones(size, size, dtype=torch.bool)
        mask.triu_(1)
        mask[0] = True
        _TABLES[size] = mask
    return _TABLES[size]


def test_a_mask_per_length() -> None:
    """One that was written in place while it was made, in a cache with an entry per shape."""
    torch.manual_seed(0)
    plain = _OfSize(_masks)
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, (torch.randn(4, 8),), budget="100%", planner="keep-all")
    lengths = (4, 6, 3, 6, 4)
    batches = [torch.randn(length, 8) for length in lengths]
    for x in batches:
        model(x).backward()
    made = dict(_TABLES)
    assert {*made} == {*lengths}
    _TABLES.clear()
    for x in batches:
        plain(x).backward()
    assert all(torch.equal(made[length], _TABLES[length]) for length in lengths)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


class _FromBuffer(_Model):
    def __init__(self) -> None:
        super().__init__(_made)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 8 not in _TABLES:
            _TABLES[8] = self.scale + _made(8)
        return self.second(self.first(x).relu() * _TABLES[8]).square().mean()


def test_a_table_from_a_buffer() -> None:
    """Refused while it is missing, with nothing of the trace left; a call of the user's makes it."""
    torch.manual_seed(0)
    plain = _FromBuffer()
    model, x = copy.deepcopy(plain), torch.randn(4, 8)
    with pytest.raises(lowtide.CaptureError, match=r"keeps tensors outside of the model .*call the model once before"):
        lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all", on_capture_error="error")
    assert not _TABLES
    model(x)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for one in (plain, model):
        one(x).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


class _EveryTime(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.cached(8)
        _LOSSES.append(_made(8))
        return self.second(self.first(x).relu() * table).square().mean()


def test_constants_that_every_call_keeps() -> None:
    """They would be missing from planned calls; nothing of them is left, nor of a cache beside them."""
    _LOSSES[:] = []
    with pytest.raises(
        lowtide.CaptureError, match=r"outside of the model \(tests\.correctness\.test_outside\._LOSSES\)"
    ):
        lowtide.rematerialize(_EveryTime(_in_default), (torch.randn(4, 8),), budget="100%", on_capture_error="error")
    assert not _LOSSES and _in_default.__defaults__ == ({},)


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
        lowtide.rematerialize(_Collecting(_made), (torch.randn(4, 8),), budget="100%", on_capture_error="error")
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
        lowtide.rematerialize(model, (torch.randn(4, 8),), budget="100%", on_capture_error="error")
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
        lowtide.rematerialize(
            _Passing(_made), (torch.randn(4, 8), *given[kind]), budget="100%", on_capture_error="error"
        )
    assert not kept and not queue and inner.value is None


@pytest.mark.parametrize("kind", ["a counter", "a list of numbers"])
def test_objects_that_are_counted_in(kind: str) -> None:
    counter, numbers = SimpleNamespace(calls=3), SimpleNamespace(seen=[0])
    given: dict[str, tuple[Any, Callable[[Any, torch.Tensor], None]]] = {
        "a counter": (counter, lambda into, tensor: setattr(into, "calls", into.calls + 1)),
        "a list of numbers": (numbers, lambda into, tensor: into.seen.append(len(into.seen))),
    }
    with pytest.raises(
        lowtide.CaptureError, match="adds to a list, a dict or an object among its arguments, or counts"
    ):
        lowtide.rematerialize(
            _Passing(_made), (torch.randn(4, 8), *given[kind]), budget="100%", on_capture_error="error"
        )
    assert counter.calls == 3 and numbers.seen == [0]


def test_a_dictionary_that_is_counted_in() -> None:
    """By planned calls alone."""
    model, x, counts = _Passing(_made), torch.randn(4, 8), {"calls": 3}
    given = counts, lambda into, tensor: into.update(calls=into["calls"] + 1)
    lowtide.rematerialize(model, (x, *given), budget="100%", on_capture_error="error")
    assert counts == {"calls": 3}
    for calls in range(4, 9):
        model(x, *given).backward()
        assert counts == {"calls": calls}


class _Settings:
    rate = 0.5

    @functools.cached_property
    def scale(self) -> float:
        return 2 * self.rate


def test_a_cached_property_of_an_argument() -> None:
    """It is the same for every call."""
    torch.manual_seed(0)
    plain, x, settings = _Passing(_made), torch.randn(4, 8), _Settings()
    model = lowtide.rematerialize(copy.deepcopy(plain), (x, settings, _read), budget="100%", planner="keep-all")
    for one in (plain, model):
        one(x, settings, _read).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def _read(settings: _Settings, tensor: torch.Tensor) -> float:
    return settings.scale


class _Marking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        vars(self.layer.weight).update(calls=[])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self.layer.weight)["calls"].append("called")
        result: torch.Tensor = self.layer(x).tanh()
        return result


def test_what_is_added_at_a_parameter_is_added_once() -> None:
    model = lowtide.rematerialize(_Marking(), budget="100%")
    for number in range(1, 4):
        model(torch.randn(4, 8)).sum().backward()
        assert vars(model.layer.weight) == {"calls": ["called"] * number}

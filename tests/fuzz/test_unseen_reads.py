# ruff: noqa: E501
"""Changes between two steps of what Python code reads by ways that no attribute shows: objects made in C, results that functions
keep, and what a process is asked for."""

from __future__ import annotations

import collections.abc
import contextvars
import csv
import ctypes
import datetime
import decimal
import enum
import faulthandler
import functools
import hashlib
import itertools
import locale
import logging
import numbers
import operator
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import CaptureError
from tests.fuzz.changed import Reader, Thing, follows, rows, same, set_attribute, step, steps

_LIST = [1.0]
_TABLE: dict[str, float] = {"number": 1.0}
_VALUES = _TABLE.values()
_VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("number", default=1.0)
_getenv, _getcwd, _depth = os.getenv, os.getcwd, sys.getrecursionlimit
_OPTIONS, _ANSWERING = types.ModuleType("options"), types.ModuleType("answering")
_BACKEND = torch.backends.cudnn


class Zone(datetime.tzinfo):
    hours = 1

    def utcoffset(self, when: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=self.hours)


class Lazy(types.ModuleType):
    @property
    def number(self) -> float:
        return _LIST[0]


class Registered:
    pass


class RegisteredToo:
    pass


class Kinds(enum.Enum):
    TABLE = {"number": 1.0}


class Doubled(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) * (2 if name == "more" else 1)


class Number(ctypes.Structure):
    _fields_ = (("value", ctypes.c_double),)


@functools.cache
def settings() -> Thing:
    return Thing(number=1.0)


@functools.lru_cache(maxsize=4)
def settings_for(key: int) -> Thing:
    return Thing(number=1.0)


@functools.cache
def listed() -> list[float]:
    return [1.0]


@functools.cache
def scaled() -> float:
    return _TABLE["number"]


def first() -> float:
    return _LIST[0]


def _set_first(state: Any) -> None:
    _LIST[0] = 2.0


def _of_context(state: Any) -> Any:
    return state.run(_VARIABLE.get)


def _pointer() -> Any:
    return ctypes.pointer(ctypes.c_double(1.0))


def _failing(compute: Any, kind: type[Exception]) -> float:
    try:
        compute()
    except kind:
        return 2.0
    return 1.0


def _failing_in_numpy() -> float:
    try:
        return float(np.isinf(np.divide(1.0, np.zeros(1)))[0])
    except FloatingPointError:
        return 2.0


_PROCESSORS = os.sched_getaffinity(0)
_LAZY, _CONTEXT, _POINTED = Lazy("lazy"), contextvars.copy_context(), _pointer()
_ZONED = datetime.datetime(2020, 1, 1, tzinfo=Zone())
_CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "values of a dictionary": (lambda: None, lambda s: sum(_VALUES), lambda s: _TABLE.update(number=2.0)),
    "arguments of a methodcaller": (lambda: operator.methodcaller("get", "more", _LIST), lambda s: s({})[0], _set_first),
    "method of a list": (lambda: _LIST.__len__, lambda s: s(), lambda s: _LIST.append(2.0)),
    "list in a slice": (lambda: slice(_LIST, None), lambda s: s.start[0], _set_first),
    "flat array": (lambda: None, lambda s: _FLAT[0], lambda s: _ARRAY.fill(2.0)),
    "function of numpy's making": (lambda: np.frompyfunc(lambda x: x * _LIST[0], 1, 1), lambda s: s(1.0), _set_first),
    "function behind a staticmethod": (lambda: {"first": staticmethod(first)}, lambda s: s["first"](), _set_first),
    "function behind a property": (lambda: property(lambda _: _LIST[0]), lambda s: s.fget(None), _set_first),
    "context": (lambda: None, lambda s: _of_context(_CONTEXT), lambda s: _CONTEXT.run(_VARIABLE.set, 2.0)),
    "time zone": (lambda: None, lambda s: _ZONED.utcoffset().total_seconds() / 3600, lambda s: setattr(_ZONED.tzinfo, "hours", 2)),
    "another time span": (lambda: Thing(span=datetime.timedelta(seconds=1)), lambda s: s.span.total_seconds(), set_attribute("span", datetime.timedelta(seconds=2))),
    "another decimal": (lambda: Thing(number=decimal.Decimal(1)), lambda s: s.number, set_attribute("number", decimal.Decimal(2))),
    "what a pointer points to": (lambda: None, lambda s: _POINTED[0], lambda s: setattr(_POINTED.contents, "value", 2.0)),
    "structure by reference": (lambda: None, lambda s: _REFERENCE._obj.value, lambda s: setattr(_STRUCTURE, "value", 2.0)),
    "member of an enumeration by its name": (lambda: "TABLE", lambda s: Kinds[s].value["number"], lambda s: Kinds.TABLE.value.update(number=2.0)),
    "property of a module": (lambda: None, lambda s: _LAZY.number, _set_first),
    "what a module says of names that it has not": (lambda: None, lambda s: _ANSWERING.number, lambda s: setattr(_ANSWERING, "__getattr__", lambda name: 2.0)),
    "name that a module says something of": (lambda: None, lambda s: _ANSWERING.number, lambda s: setattr(_ANSWERING, "number", 2.0)),
    "class of a module": (lambda: setattr(_OPTIONS, "more", 1.0), lambda s: _OPTIONS.more, lambda s: setattr(_OPTIONS, "__class__", Doubled)),
    "class registered with one of a library's": (Registered, lambda s: 1.0 + isinstance(s, collections.abc.Mapping), lambda s: collections.abc.Mapping.register(Registered)),
    "class registered with a kind of numbers": (RegisteredToo, lambda s: 1.0 + issubclass(type(s), numbers.Number), lambda s: numbers.Number.register(RegisteredToo)),
    "how a decimal number is rounded": (lambda: decimal.Decimal("2.5"), lambda s: s.to_integral_value(), lambda s: setattr(decimal.getcontext(), "rounding", decimal.ROUND_UP)),
    "home": (lambda: None, lambda s: len(str(Path.home())), lambda s: os.environ.update(HOME="/the/home/of/another")),
    "hasattr of a module": (lambda: None, lambda s: 1.0 + hasattr(_OPTIONS, "more"), lambda s: setattr(_OPTIONS, "more", 2.0)),
    "number in a library's module": (lambda: setattr(logging, "raiseExceptions", True), lambda s: 1.0 + logging.raiseExceptions, lambda s: setattr(logging, "raiseExceptions", False)),
    "cached object": (lambda: settings.cache_clear(), lambda s: settings().number, lambda s: setattr(settings(), "number", 2.0)),
    "object cached before": (lambda: setattr(settings(), "number", 1.0), lambda s: settings().number, lambda s: setattr(settings(), "number", 2.0)),
    "object in a cache of limited size": (lambda: settings_for.cache_clear(), lambda s: settings_for(1).number, lambda s: setattr(settings_for(1), "number", 2.0)),
    "cached list": (lambda: listed.cache_clear(), lambda s: listed()[0], lambda s: operator.setitem(listed(), 0, 2.0)),
    "cache that was filled anew": (lambda: operator.setitem(listed(), 0, 3.0), lambda s: listed()[0], lambda s: listed.cache_clear()),
    "number that was cached before it was cleared": (lambda: (scaled.cache_clear(), scaled()), lambda s: scaled(), lambda s: (_TABLE.update(number=2.0), scaled.cache_clear())),
    "environment by another name": (lambda: None, lambda s: float(_getenv("LOWTIDE_TEST_NUMBER", "1")), lambda s: os.environ.update(LOWTIDE_TEST_NUMBER="2")),
    "working directory by another name": (lambda: None, lambda s: len(_getcwd()), lambda s: os.chdir("/")),
    "limit by another name": (lambda: sys.setrecursionlimit(2000), lambda s: _depth() / 1000, lambda s: sys.setrecursionlimit(3000)),
    "level of a logger above": (lambda: logging.getLogger("lowtide_test").setLevel(30), lambda s: 1.0 + logging.getLogger("lowtide_test.inner").isEnabledFor(10), lambda s: logging.getLogger("lowtide_test").setLevel(10)),
    "name of the thread": (lambda: None, lambda s: len(threading.current_thread().name), lambda s: setattr(threading.current_thread(), "name", "another name")),
    "errors of numpy": (lambda: np.seterr(divide="warn"), lambda s: 1.0 + (np.geterr()["divide"] == "ignore"), lambda s: np.seterr(divide="ignore")),
    "which decimal numbers are errors": (lambda: decimal.getcontext().traps.__setitem__(decimal.DivisionByZero, True), lambda s: _failing(lambda: decimal.Decimal(1) / decimal.Decimal(0), decimal.DivisionByZero), lambda s: decimal.getcontext().traps.__setitem__(decimal.DivisionByZero, False)),
    "which of numpy's numbers are errors": (lambda: np.seterr(divide="ignore"), lambda s: _failing_in_numpy(), lambda s: np.seterr(divide="raise")),
    "processors": (lambda: os.sched_setaffinity(0, _PROCESSORS), lambda s: 1.0 + min(os.sched_getaffinity(0)), lambda s: os.sched_setaffinity(0, {max(_PROCESSORS)})),
    "locale": (lambda: locale.setlocale(locale.LC_NUMERIC, "C"), lambda s: len(locale.setlocale(locale.LC_NUMERIC)), lambda s: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")),
    "faults": (lambda: faulthandler.disable(), lambda s: 1.0 + faulthandler.is_enabled(), lambda s: faulthandler.enable(file=sys.__stderr__)),
    "time-out of sockets": (lambda: socket.setdefaulttimeout(1.0), lambda s: socket.getdefaulttimeout(), lambda s: socket.setdefaulttimeout(2.0)),
    "flag of a backend by another name": (lambda: setattr(_BACKEND, "benchmark", False), lambda s: 1.0 + _BACKEND.benchmark, lambda s: setattr(_BACKEND, "benchmark", True)),
    "module by its name": (lambda: None, lambda s: __import__("tests.fuzz.changed", fromlist=["Thing"]).Thing.number, lambda s: setattr(Thing, "number", 2.0)),
    "attribute that a library's module gets": (lambda: None, lambda s: getattr(sys, "lowtide_test", 1.0), lambda s: setattr(sys, "lowtide_test", 2.0)),
    "attribute that a module of PyTorch's gets": (lambda: None, lambda s: 1.0 + hasattr(torch.nn, "lowtide_test"), lambda s: setattr(torch.nn, "lowtide_test", 2.0)),
    "attribute that tensors get": (lambda: None, lambda s: getattr(torch.ones(1), "lowtide_test", 1.0), lambda s: setattr(torch.Tensor, "lowtide_test", 2.0)),
}  # fmt: skip
_ARRAY = np.ones(3)
_FLAT = _ARRAY.flat
_STRUCTURE = Number(1.0)
_REFERENCE = ctypes.byref(_STRUCTURE)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(os.path.dirname(__file__))
    thread, limit, errors, told = (
        threading.current_thread().name,
        sys.getrecursionlimit(),
        np.geterr(),
        faulthandler.is_enabled(),
    )
    formats, timeout = locale.setlocale(locale.LC_NUMERIC), socket.getdefaulttimeout()
    monkeypatch.setenv("HOME", os.environ["HOME"])
    monkeypatch.setattr(_ANSWERING, "__getattr__", lambda name: 1.0, raising=False)
    with decimal.localcontext():
        yield
    _OPTIONS.__class__ = types.ModuleType
    vars(_ANSWERING).pop("number", None)
    os.sched_setaffinity(0, _PROCESSORS)
    sys.setrecursionlimit(limit)
    threading.current_thread().name = thread
    np.seterr(**errors)
    locale.setlocale(locale.LC_NUMERIC, formats)
    socket.setdefaulttimeout(timeout)
    faulthandler.enable(file=sys.__stderr__) if told else faulthandler.disable()
    os.environ.pop("LOWTIDE_TEST_NUMBER", None)
    _BACKEND.benchmark = False
    logging.raiseExceptions = True
    _LIST[:] = [1.0]
    _TABLE["number"] = _STRUCTURE.value = Kinds.TABLE.value["number"] = 1.0
    vars(_OPTIONS).pop("more", None)
    Thing.number = 1.0
    for owner in (sys, torch.nn, torch.Tensor):
        if hasattr(owner, "lowtide_test"):
            delattr(owner, "lowtide_test")


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in _CASES.items()])
def test_what_is_read_unseen(case: Any) -> None:
    make, read, change = case
    follows(Reader(make(), read), lambda model: (change(model.state), None)[1])


def test_results_that_are_added_to_a_cache_are_no_change() -> None:
    settings_for.cache_clear()
    settings_for(1)
    model = Reader(None, lambda s: settings_for(1).number)
    lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all")
    for key in (2, 3):
        settings_for(key)
        model(rows()).backward()
    assert len(lowtide.plans(model)) == 1


def test_a_cache_that_is_cleared_and_filled_again() -> None:
    """It has as many results as before then, and another one among them."""
    scaled.cache_clear()
    model = Reader(None, lambda s: scaled())
    lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all")
    for change in (lambda: _TABLE.update(number=2.0), scaled.cache_clear, lambda: _TABLE.update(number=1.0)):
        change()
        expected = step(model, (rows(),), plain=True)
        assert same(step(model, (rows(),), plain=False), expected)
        assert same(step(model, (rows(),), plain=False), expected)


def test_a_file_that_is_open(tmp_path: Path) -> None:
    path = tmp_path / "number.txt"
    path.write_text("1.0")
    global _FILE
    with open(path) as _FILE:
        follows(Reader(None, lambda s: os.pread(_FILE.fileno(), 3, 0)), lambda model: (path.write_text("2.0"), None)[1])


_FILE: Any = None
_DATABASE = sqlite3.connect(":memory:", check_same_thread=False)
_DIGEST = hashlib.sha256()
_PROCESS = ctypes.CDLL(None).getpid


@pytest.mark.parametrize(
    "read",
    [
        lambda s: _DATABASE.execute("select 1.0").fetchone()[0],
        lambda s: _DIGEST.digest()[0] + 1,
        lambda s: _PROCESS(),
        lambda s: sqlite3.connect(":memory:").execute("select 1.0").fetchone()[0],
        lambda s: float(subprocess.check_output(["echo", "1"])),
    ],
    ids=["database", "digest", "function of a shared library", "new database", "another process"],
)
def test_what_shows_nothing_is_refused(read: Any) -> None:
    model = Reader(None, read)
    with pytest.raises(CaptureError, match=r"native code|another process"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")


def test_a_file_that_is_written_with_its_size_and_time_kept(tmp_path: Path) -> None:
    path = tmp_path / "number.txt"

    def writes(number: str) -> None:
        path.write_text(number)
        os.utime(path, ns=(1, 1))

    writes("1.0")
    follows(Reader(None, lambda s: path.read_text()), lambda model: writes("2.0"))


def test_constants_that_cannot_be_copied() -> None:
    state = [torch.finfo(torch.float32), struct.Struct("b"), threading.RLock()]
    follows(Reader(state, lambda s: s[1].size), lambda model: operator.setitem(state, 1, struct.Struct("h")))


_ITERATORS: dict[str, Callable[[], Any]] = {
    "list": lambda: [iter([1.0, 2.0, 3.0, 4.0])],
    "list of one": lambda: [iter([3.0])],
    "list of three": lambda: [iter([3.0, 4.0, 5.0])],
    "count": lambda: {"next": itertools.count(1)},
    "cycle": lambda: [itertools.cycle([1.0, 2.0])],
    "generator": lambda: [(float(number) for number in range(1, 9))],
    "rows of a table": lambda: [csv.reader(["1", "2", "3"])],
    "zip": lambda: (lambda one: [one, zip(one, one, strict=False)])(iter([1.0, 2.0, 3.0, 4.0, 5.0])),
}
_STREAMS: Any = None


def _next_of_streams(state: Any) -> float:
    stream = [*_STREAMS.values()][-1] if isinstance(_STREAMS, dict) else _STREAMS[-1]
    found = next(stream, 1.0)
    return float(found[0] if isinstance(found, (tuple, list)) else found)


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in _ITERATORS.items()])
def test_iterators_in_containers_are_where_they_were(make: Callable[[], Any]) -> None:
    def made() -> Reader:
        global _STREAMS
        _STREAMS = make()
        return Reader(None, _next_of_streams)

    plain, planned = (steps(made, planned=planned, count=5) for planned in (False, True))
    assert all(
        torch.equal(*pair) for one, other in zip(plain, planned, strict=True) for pair in zip(one, other, strict=True)
    )


_MEMO: dict[str, float] = {}


def _remembered(state: Any) -> float:
    if "number" not in _MEMO:
        _MEMO["number"] = 1.0
    return _MEMO["number"]


def test_what_the_first_call_fills_is_followed() -> None:
    _MEMO.clear()
    follows(Reader(None, _remembered), lambda model: _MEMO.update(number=2.0))


def test_a_database_is_read_in_every_step() -> None:
    _DATABASE.execute("create table if not exists numbers (number)")

    def made() -> nn.Module:
        _DATABASE.execute("delete from numbers")
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Reader(None, _stored))

    plain, planned = (steps(made, planned=planned) for planned in (False, True))
    assert all(
        torch.equal(*pair) for one, other in zip(plain, planned, strict=True) for pair in zip(one, other, strict=True)
    )


def _stored(state: Any) -> float:
    """One more in every call."""
    _DATABASE.execute("insert into numbers values (1.0)")
    found: float = _DATABASE.execute("select sum(number) from numbers").fetchone()[0]
    return found

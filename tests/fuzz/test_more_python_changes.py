# ruff: noqa: E501
"""More of what a model's Python code reads, changed between two steps (see ``test_python_changes``): the next one is as in eager."""

from __future__ import annotations

import collections
import configparser
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import itertools
import json
import multiprocessing
import operator
import pickle
import queue
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attr
import numpy as np
import pytest
import torch

from tests.fuzz.changed import Reader, Thing, follows
from tests.fuzz.changed import set_attribute as _set
from tests.fuzz.changed import set_item as _put


class Weekday(enum.Flag):
    FIRST = 1
    SECOND = 2


class Scaled:
    """A data descriptor with a factor of its own."""

    factor = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__["number"] * self.factor

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["number"] = value


def described() -> Any:
    made = type("Described", (), {"number": Scaled()})()
    made.number = 1.0
    return made


class ScaledArray(np.ndarray):
    """An array with an attribute, which copies of NumPy's leave out."""

    scale: float = 1.0


def _with_scale(array: Any) -> Any:
    array.scale = 2.0
    return array


def _read_only() -> np.ndarray:
    array = np.ones(2)
    array.setflags(write=False)
    return array


@functools.singledispatch
def dispatched(value: Any) -> float:
    return 1.0


class Dispatches:
    @functools.singledispatchmethod
    def number(self, value: Any) -> float:
        return 1.0


_NUMBER: Any = 1.0
_COUNT = itertools.count(1)
_VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("unset")
_LOCAL = threading.local()
_SHARED = multiprocessing.Value("d", 1.0)
_QUEUE: Any = queue.Queue()
_POINTER = ctypes.pointer(ctypes.c_double(1.0))
_OWNER = Thing()
_WEAK: Any = weakref.WeakKeyDictionary({_OWNER: 1.0})


@functools.lru_cache
def cached_number() -> Any:
    return _NUMBER


class Partial:
    def given(self, number: float) -> float:
        return number

    of_one = functools.partialmethod(given, number=1.0)


class Named(NamedTuple):
    number: float = 1.0
    inner: Any = None


@dataclasses.dataclass
class Options:
    items: list[Any] = dataclasses.field(default_factory=lambda: [1.0])
    inner: Any = None


@dataclasses.dataclass(slots=True)
class SlottedOptions:
    number: float = 1.0
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenOptions:
    table: dict[str, Any] = dataclasses.field(default_factory=lambda: {"x": [1.0]})


@attr.s
class Attributes:
    inner = attr.ib(factory=lambda: [1.0])


@attr.frozen
class FrozenAttributes:
    number: float = 1.0


class Nested(dict):  # type: ignore[type-arg]
    """A dictionary whose items are attributes, and the other way round."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        for name, item in items.items():
            setattr(self, name, item)

    def __setattr__(self, name: str, value: Any) -> None:
        value = Nested(**value) if type(value) is dict else value
        super().__setattr__(name, value)
        super().__setitem__(name, value)


class Interpolated:
    """A configuration whose values may name others of the outermost one."""

    def __init__(self, content: dict[str, Any], parent: Any = None) -> None:
        self.__dict__.update(_content=content, _parent=parent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value, root = self.__dict__["_content"][name], self
        while isinstance(value, str) and root.__dict__["_parent"] is not None:
            root = root.__dict__["_parent"]
        return getattr(root, value) if isinstance(value, str) else value


def interpolated() -> Any:
    root = Interpolated({"rate": 1.0})
    root._content["part"] = Interpolated({"number": "rate"}, root)
    return root


class Registered:
    known: dict[str, Any] = {}
    number = 1.0

    def __init_subclass__(cls, **options: Any) -> None:
        Registered.known[cls.__name__] = cls


class Delegates:
    def __init__(self) -> None:
        self.other = Thing(number=1.0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["other"], name)


class OfGlobal:
    @property
    def number(self) -> Any:
        return _NUMBER


class OfClass:
    _number = 1.0

    @classmethod
    def number(cls) -> float:
        return cls._number


class Inherits:
    def __init__(self) -> None:
        self.number = 1.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    @property
    def twice(self) -> float:
        return self.number * 2


class Summed:
    def __init__(self) -> None:
        self.parts = [1.0]

    @functools.cached_property
    def number(self) -> float:
        return sum(self.parts)


def of_loop() -> list[Any]:
    made, number = [], 1.0
    for number in (1.0, 3.0):
        made.append(lambda: number)  # noqa: B023

    def change(to: float) -> None:
        nonlocal number
        number = to

    return [*made, change]


def with_default() -> Any:
    def inner(items: Any = {"number": 1.0}) -> Any:  # noqa: B006
        return items["number"]

    return inner


def keyword(*, number: float = 1.0) -> float:
    return number


def made_inside(scale: list[float] = [1.0]) -> float:  # noqa: B006
    def inner(found: list[float] = scale) -> float:
        return found[0]

    return inner()


def matched(state: Any) -> float:
    match state:
        case SlottedOptions(number=1.0):
            return 1.0
        case _:
            return 2.0


def _call_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: globals().__setitem__(name, value)


def _bound() -> Any:
    made = Thing(number=1.0)
    made.method = types.MethodType(lambda self: self.number, made)
    return made


def _behind_iterator() -> Any:
    items = [1.0, 2.0]
    return [items, iter(items)]


def _weak_set() -> Any:
    owner = Thing()
    return Thing(owner=owner, items=weakref.WeakSet([owner]))


def _configuration() -> Any:
    made = configparser.ConfigParser()
    made.read_string("[part]\nnumber=1.0\n")
    return made


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "combination of flags": (lambda: Thing(day=Weekday.FIRST), lambda s: 1.0 + bool(s.day & Weekday.SECOND), _set("day", Weekday.FIRST | Weekday.SECOND)),
    "state of a descriptor": (described, lambda s: s.number, lambda s: setattr(type(s).__dict__["number"], "factor", 2.0)),
    "replaced descriptor": (described, lambda s: s.number, lambda s: setattr(type(s), "number", property(lambda s: 5.0))),
    "singledispatch": (lambda: 1, lambda s: dispatched(s), lambda s: dispatched.register(int, lambda value: 2.0)),
    "singledispatchmethod": (Dispatches, lambda s: s.number(1), lambda s: Dispatches.__dict__["number"].register(int, lambda self, value: 2.0)),
    "cleared lru_cache": (lambda: None, lambda s: cached_number(), lambda s: (globals().__setitem__("_NUMBER", 9.0), cached_number.cache_clear())),
    "keywords of a partialmethod": (lambda: type("Local", (), {"given": Partial.given, "one": functools.partialmethod(Partial.given, number=1.0)})(), lambda s: s.one(), lambda s: type(s).__dict__["one"].keywords.update(number=2.0)),
    "replaced partialmethod": (lambda: type("Local", (Partial,), {})(), lambda s: s.of_one(), lambda s: setattr(type(s), "of_one", functools.partialmethod(Partial.given, 2.0))),
    "replaced named tuple": (lambda: Thing(pair=Named()), lambda s: s.pair.number, _set("pair", Named(2.0))),
    "object in a named tuple": (lambda: Named(1.0, Thing(number=1.0)), lambda s: s.inner.number, lambda s: _set("number", 2.0)(s.inner)),
    "default factory": (lambda: Options(inner=Options()), lambda s: s.inner.items[0], lambda s: _put(0, 2.0)(s.inner.items)),
    "dataclasses.asdict": (lambda: Options(inner=Options()), lambda s: dataclasses.asdict(s)["inner"]["items"][0], lambda s: _put(0, 2.0)(s.inner.items)),
    "dataclass with slots": (lambda: SlottedOptions(inner=SlottedOptions()), lambda s: s.inner.number, lambda s: _set("number", 2.0)(s.inner)),
    "container of a frozen dataclass": (FrozenOptions, lambda s: s.table["x"][0], lambda s: _put(0, 2.0)(s.table["x"])),
    "dataclasses.replace": (SlottedOptions, lambda s: dataclasses.replace(s, inner=None).number, _set("number", 2.0)),
    "text of a dataclass": (SlottedOptions, lambda s: len(repr(s)), _set("number", 222.0)),
    "match": (SlottedOptions, matched, _set("number", 2.0)),
    "array in a dict in a dataclass": (lambda: Options(items=[{"a": np.ones(2)}]), lambda s: float(s.items[0]["a"][0]), lambda s: _put(0, 3.0)(s.items[0]["a"])),
    "attrs": (Attributes, lambda s: s.inner[0], lambda s: _put(0, 2.0)(s.inner)),
    "frozen attrs": (lambda: Thing(options=FrozenAttributes()), lambda s: s.options.number, _set("options", FrozenAttributes(2.0))),
    "set of texts": (lambda: {"a", "b"}, lambda s: 1.0 + ("c" in s), lambda s: s.add("c")),
    "list's iterator": (lambda: iter([1.0, 2.0]), lambda s: next(copy.copy(s)), lambda s: next(s)),
    "list behind an iterator": (_behind_iterator, lambda s: next(copy.copy(s[1])), lambda s: _put(0, 5.0)(s[0])),
    "reversed": (lambda: reversed([1.0, 2.0]), lambda s: next(copy.copy(s)), lambda s: next(s)),
    "global count": (lambda: None, lambda s: next(copy.copy(_COUNT)), lambda s: next(_COUNT)),
    "variable of a loop": (of_loop, lambda s: s[0](), lambda s: s[2](7.0)),
    "default that a loop set": (lambda: [lambda number=number: number for number in (1.0, 2.0)], lambda s: s[0](), lambda s: setattr(s[0], "__defaults__", (5.0,))),
    "default of a nested function": (with_default, lambda s: s(), lambda s: s.__defaults__[0].update(number=2.0)),
    "default of a default": (lambda: None, lambda s: made_inside(), lambda s: _put(0, 2.0)(made_inside.__defaults__[0])),
    "replaced keyword defaults": (lambda: None, lambda s: keyword(), lambda s: setattr(keyword, "__kwdefaults__", {"number": 2.0})),
    "delegated attribute": (Delegates, lambda s: s.number, lambda s: _set("number", 2.0)(s.other)),
    "property of a global": (OfGlobal, lambda s: s.number, _call_global("_NUMBER", 3.0)),
    "property called by hand": (Inherits, lambda s: Inherits.twice.fget(s), _set("number", 2.0)),
    "read by super()": (Inherits, lambda s: s.number, _set("number", 2.0)),
    "class method of a global class": (lambda: None, lambda s: OfClass.number(), lambda s: setattr(OfClass, "_number", 2.0)),
    "registry by __init_subclass__": (lambda: type("First", (Registered,), {}).__name__, lambda s: Registered.known[s].number, lambda s: type("First", (Registered,), {"number": 3.0})),
    "nested attribute dictionaries": (lambda: Nested(a={"number": 1.0}), lambda s: s.a.number, lambda s: setattr(s.a, "number", 2.0)),
    "interpolated configuration": (interpolated, lambda s: s.part.number, lambda s: s._content.update(rate=2.0)),
    "global weak dictionary": (lambda: None, lambda s: next(iter(_WEAK.values())), lambda s: _put(_OWNER, 2.0)(_WEAK)),
    "weak set": (_weak_set, lambda s: 1.0 + len(s.items), lambda s: s.items.clear()),
    "shared value": (lambda: None, lambda s: _SHARED.value, lambda s: setattr(_SHARED, "value", 2.0)),
    "pointer": (lambda: None, lambda s: _POINTER.contents.value, lambda s: setattr(_POINTER.contents, "value", 2.0)),
    "queue": (lambda: _QUEUE.put(1.0), lambda s: _QUEUE.qsize(), lambda s: _QUEUE.put(2.0)),
    "configparser": (_configuration, lambda s: float(s["part"]["number"]), lambda s: s.set("part", "number", "2.0")),
    "array of no dimension": (lambda: np.array(1.0), lambda s: float(s), lambda s: s.fill(2.0)),
    "attribute of an array of its own class": (lambda: _with_scale(np.ones(2).view(ScaledArray)), lambda s: s.scale, lambda s: setattr(s, "scale", 3.0)),
    "masked array": (lambda: np.ma.array([1.0, 2.0], mask=[0, 0]), lambda s: float(s.sum()), _put(1, np.ma.masked)),
    "transposed array": (lambda: Thing(a=np.arange(4.0).reshape(2, 2)), lambda s: s.a[0, 1], lambda s: setattr(s, "a", s.a.T)),
    "order of an array's items in memory": (lambda: Thing(a=np.arange(4.0).reshape(2, 2)), lambda s: s.a.ravel(order="K")[1], lambda s: setattr(s, "a", np.asfortranarray(s.a))),
    "whether an array may be written": (lambda: np.ones(2), lambda s: 1.0 + s.flags.writeable, lambda s: s.setflags(write=False)),
    "that an array may be written": (_read_only, lambda s: 1.0 + s.flags.writeable, lambda s: s.setflags(write=True)),
    "steps of an array": (lambda: Thing(a=np.ones((4, 4))[::2, ::2]), lambda s: s.a.strides[0], lambda s: setattr(s, "a", s.a.copy())),
    "names of an array's fields": (lambda: np.zeros(1, [("a", float)]), lambda s: len(s.dtype.names[0]), lambda s: setattr(s.dtype, "names", ("abc",))),
    "Decimal": (lambda: Thing(number=decimal.Decimal("1.0")), lambda s: s.number, _set("number", decimal.Decimal("2.0"))),
    "timedelta": (lambda: Thing(time=datetime.timedelta(seconds=1)), lambda s: s.time.total_seconds(), _set("time", datetime.timedelta(seconds=2))),
    "pattern": (lambda: Thing(pattern=re.compile("a")), lambda s: 1.0 + bool(s.pattern.match("b")), _set("pattern", re.compile("b"))),
    "shape": (lambda: Thing(shape=torch.Size([1, 2])), lambda s: s.shape[0], _set("shape", torch.Size([3, 2]))),
    "slice in a list": (lambda: [slice(0, 1)], lambda s: len([1, 2][s[0]]), _put(0, slice(0, 2))),
    "context variable without a value": (lambda: None, lambda s: _VARIABLE.get(1.0), lambda s: _VARIABLE.set(2.0)),
    "dictionary of the thread": (lambda: setattr(_LOCAL, "table", {"number": 1.0}), lambda s: _LOCAL.table["number"], lambda s: _LOCAL.table.update(number=2.0)),
    "most common of a Counter": (lambda: collections.Counter("ab"), lambda s: s.most_common(1)[0][1], lambda s: s.update("aa")),
    "ChainMap with a map more": (lambda: collections.ChainMap({"a": 1.0}), lambda s: s["a"], lambda s: s.maps.insert(0, {"a": 2.0})),
    "bound method of the object itself": (_bound, lambda s: s.method(), _set("number", 2.0)),
    "replaced bound method": (_bound, lambda s: s.method(), lambda s: setattr(s, "method", types.MethodType(lambda self: 4.0, s))),
    "JSON of all attributes": (lambda: Thing(a=1.0), lambda s: len(json.dumps(vars(s))), _set("a", 123.456)),
    "copy": (lambda: Thing(number=1.0), lambda s: copy.copy(s).number, _set("number", 2.0)),
    "deep copy": (lambda: Thing(inner=Thing(number=1.0)), lambda s: copy.deepcopy(s).inner.number, lambda s: _set("number", 2.0)(s.inner)),
    "pickle": (lambda: Thing(inner=Thing(number=1.0)), lambda s: pickle.loads(pickle.dumps(s)).inner.number, lambda s: _set("number", 2.0)(s.inner)),
    "operator.itemgetter": (lambda: [{"a": 1.0}, operator.itemgetter("a")], lambda s: s[1](s[0]), lambda s: _put("a", 2.0)(s[0])),
    "input of a cached property that is gone": (Summed, lambda s: s.number, lambda s: (s.__dict__.pop("number"), s.parts.append(2.0))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals_as_before() -> Any:
    before = dict(globals())
    yield
    globals().update(before)
    cached_number.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_changes_between_steps(name: str) -> None:
    make, read, change = CASES[name]
    follows(Reader(make(), read), lambda model: (change(model.state), None)[1])


def _json(path: Path, number: float) -> None:
    path.write_text(json.dumps({"number": number}))


def _link(path: Path, number: float) -> None:
    target = path.with_name(f"{number}.json")
    _json(target, number)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


FILES: dict[str, tuple[Callable[[Path, float], Any], Callable[[Path], Any]]] = {
    "json": (_json, lambda path: json.loads(path.read_text())["number"]),
    "pickle": (lambda path, number: path.write_bytes(pickle.dumps(number)), lambda path: pickle.loads(path.read_bytes())),
    "npy": (lambda path, number: np.save(path, np.full(2, number)), lambda path: np.load(path)[0]),
    "pt": (lambda path, number: torch.save({"number": number}, path), lambda path: torch.load(path)["number"]),
    "link": (_link, lambda path: json.loads(path.read_text())["number"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_written_anew(kind: str, tmp_path: Path) -> None:
    write, read = FILES[kind]
    path = tmp_path / "number.npy"
    write(path, 1.0)
    follows(Reader(path, read), lambda model: write(path, 2.25))


def test_a_module_that_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "constants_of_a_test.py"
    path.write_text("number = 1.0\n")
    module = importlib.import_module(path.stem)
    monkeypatch.setitem(globals(), "_MODULE", module)

    def change(model: Any) -> None:
        path.write_text("number = 2.0 + 0.25\n")
        importlib.reload(module)

    follows(Reader(None, lambda state: _MODULE.number), change)
    sys.modules.pop(path.stem)


_MODULE: Any = None

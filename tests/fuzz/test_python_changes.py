# ruff: noqa: E501
"""What a model's Python code reads is changed between two steps, in every way we could think of: the next step is as in eager.

Each case makes something to read, a function that reads a number of it, and a change. The model scales by that number; it is
planned, the change is made, and the planned model must compute what plain eager does: with the new number, to the bit.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import enum
import fractions
import functools
import itertools
import mmap
import operator
import os
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtide
from tests.fuzz.changed import Reader, follows, rows
from tests.fuzz.changed import set_attribute as _set
from tests.fuzz.changed import set_item as _put


class Thing:
    """An object of the user's."""

    number: float = 1.0

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __call__(self) -> Any:
        return self.number


class Slotted:
    __slots__ = ("__weakref__", "number")

    def __init__(self, number: float = 1.0) -> None:
        self.number = number


class MoreSlotted(Slotted):
    __slots__ = ("other",)


class Computed:
    """Its attribute is made by a property."""

    def __init__(self) -> None:
        self._parts = [1.0, 0.0]

    @property
    def number(self) -> float:
        return sum(self._parts)


class Cached:
    def __init__(self) -> None:
        self.start = 1.0

    @functools.cached_property
    def number(self) -> float:
        return self.start * 2


class Dynamic:
    """Its attributes are items elsewhere."""

    def __init__(self) -> None:
        self.data = {"number": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["data"][name]


class Secretive:
    """Reads of it are answered by code of its own."""

    def __init__(self) -> None:
        self.number = 1.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class AttributeDict(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Other(Thing):
    number = 5.0


class Methods:
    def first(self) -> float:
        return 1.0

    def second(self) -> float:
        return 6.0

    @staticmethod
    def fixed() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0


@dataclasses.dataclass
class Settings:
    number: float = 1.0
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: float = 1.0


class Pair(tuple[Any, Any]):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1.0
    BLUE = 7.0


class Sequence(collections.UserList):  # type: ignore[type-arg]
    pass


class Structure(ctypes.Structure):
    _fields_ = (("number", ctypes.c_double),)


_NUMBER: Any = 1.0
_REGISTRY: list[Any] = []
_TABLE: dict[Any, Any] = {}
_NUMBERS = [1.0] * 300
_VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("number", default=1.0)
_LOCAL = threading.local()
_CONSTANTS = types.ModuleType("constants")
_THING = Thing()


def helper(scale: float = 1.0) -> float:
    return scale


def collecting(found: list[Any] = [1.0], *, more: dict[str, Any] = {"x": Thing()}) -> float:  # noqa: B006, B008
    return float(found[0] * more["x"].number)


def other_helper(scale: float = 8.0) -> float:
    return scale


def nested(depth: int, kind: Callable[..., Any] = Thing) -> Any:
    made = kind(number=1.0) if kind is Thing else [1.0]
    for _ in range(depth):
        made = kind(inner=made) if kind is Thing else [made]
    return made


def deepest(thing: Any) -> Any:
    while hasattr(thing, "inner"):
        thing = thing.inner
    return thing


def innermost(items: list[Any]) -> Any:
    while isinstance(items[0], list):
        items = items[0]
    return items


def closure() -> tuple[Callable[[], float], list[Any]]:
    held: list[Any] = [{"x": [Thing()]}]
    return (lambda: held[0]["x"][0].number), held


def counter() -> tuple[Callable[[], float], Callable[[float], None]]:
    number = 1.0

    def read() -> float:
        return number

    def change(to: float) -> None:
        nonlocal number
        number = to

    return read, change


def unset_variable() -> tuple[Callable[[], float], Callable[[], None]]:
    number = 1.0

    def read() -> float:
        try:
            return number
        except NameError:
            return 2.0

    def delete() -> None:
        nonlocal number
        del number

    return read, delete


def _call_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: globals().__setitem__(name, value)


def _swap(state: Any) -> None:
    state[0], state[1] = state[1], state[0]


def _new_dictionary(state: Any) -> None:
    state.__dict__ = {"number": 3.0}


def _new_class(state: Any) -> None:
    state.__class__ = Other


def _mapped() -> mmap.mmap:
    made = mmap.mmap(-1, 8)
    made[0] = 1
    return made


def _file() -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp()) / "number.txt"
    path.write_text("1.0")
    return path


def read_file(path: Path) -> float:
    with open(path) as file:
        return float(file.read())


def _owner_and_reference() -> Any:
    owner = Thing(number=1.0)
    return [owner, weakref.ref(owner)]


def _structured() -> Any:
    return np.array([(1.0, 2)], dtype=[("number", "f8"), ("count", "i4")])


def _viewing() -> Any:
    base = np.ones(64)
    return {"base": base, "view": base[::2]}


def _same_object_twice() -> Any:
    shared = Thing(number=1.0)
    return [shared, shared]


def _split(state: Any) -> None:
    state[1] = Thing(number=2.0)


def _function(state: Any) -> Any:
    return helper() * collecting()


# name: what is made, how a number is read from it, and the change.
Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    **{
        f"objects {depth} deep": (functools.partial(nested, depth), lambda s: deepest(s).number, lambda s: _set("number", 2.0)(deepest(s)))
        for depth in (0, 1, 3, 4, 5, 6, 9, 40)
    },
    **{
        f"lists {depth} deep": (functools.partial(nested, depth, list), lambda s: innermost(s)[0], lambda s: _put(0, 2.0)(innermost(s)))
        for depth in (1, 5, 30)
    },
    "dicts and objects": (lambda: {"a": Thing(b={"c": [Thing(number=1.0)]})}, lambda s: s["a"].b["c"][0].number, lambda s: _set("number", 2.0)(s["a"].b["c"][0])),
    "last of 2,000 objects": (lambda: [Thing(number=1.0) for _ in range(2000)], lambda s: s[-1].number, lambda s: _set("number", 2.0)(s[-1])),
    "last of 2,000 numbers": (lambda: [1.0] * 2000, lambda s: s[-1], _put(-1, 2.0)),
    "value of a large dict": (lambda: dict.fromkeys(range(3000), 1.0), lambda s: s[2999], _put(2999, 2.0)),
    "array.array": (lambda: array.array("d", [1.0, 2.0]), lambda s: s[0], _put(0, 2.0)),
    "bytearray": (lambda: bytearray(b"\1\2"), lambda s: s[0], _put(0, 5)),
    "memoryview": (lambda: memoryview(bytearray(b"\1\2")), lambda s: s[0], _put(0, 5)),
    "mmap": (_mapped, lambda s: s[0], _put(0, 5)),
    "ctypes structure": (lambda: Structure(1.0), lambda s: s.number, _set("number", 2.0)),
    "ctypes array": (lambda: (ctypes.c_double * 3)(1.0, 2.0, 3.0), lambda s: s[0], _put(0, 9.0)),
    "array of objects": (lambda: np.array([Thing(number=1.0), None], dtype=object), lambda s: s[0].number, lambda s: _set("number", 2.0)(s[0])),
    "another in an array of objects": (lambda: np.array([Thing(number=1.0), None], dtype=object), lambda s: s[0].number, _put(0, Thing(number=2.0))),
    "array of 24 MB": (lambda: np.ones(3 << 20), lambda s: float(s[-1]), _put(-1, 2.0)),
    "structured array": (_structured, lambda s: float(s["number"][0]), lambda s: _put(0, 4.0)(s["number"])),
    "view of an array": (_viewing, lambda s: float(s["view"][1]), lambda s: _put(2, 3.0)(s["base"])),
    "shape of an array": (lambda: Thing(a=np.ones(6)), lambda s: float(len(s.a)), lambda s: s.a.resize((3, 2), refcheck=False)),
    "NumPy scalar": (lambda: Thing(number=np.float64(1.0)), lambda s: s.number, _set("number", np.float64(2.0))),
    "type of a NumPy scalar": (lambda: Thing(number=np.float64(1.0)), lambda s: 1.0 + isinstance(s.number, np.float32), _set("number", np.float32(1.0))),
    "behind weakref.ref": (_owner_and_reference, lambda s: s[1]().number, lambda s: _set("number", 2.0)(s[0])),
    "weak dictionary": (lambda: Thing(owner=Slotted(), found=weakref.WeakValueDictionary()), lambda s: s.found.setdefault("x", s.owner).number, lambda s: _set("number", 2.0)(s.owner)),
    "inside functools.partial": (lambda: functools.partial(getattr, Thing(number=1.0), "number"), lambda s: s(), lambda s: _set("number", 2.0)(s.args[0])),
    "keyword of functools.partial": (lambda: functools.partial(dict, thing=Thing(number=1.0)), lambda s: s()["thing"].number, lambda s: _set("number", 2.0)(s.keywords["thing"])),
    "closure over containers": (closure, lambda s: s[0](), lambda s: _set("number", 2.0)(s[1][0]["x"][0])),
    "variable of a closure": (counter, lambda s: s[0](), lambda s: s[1](2.0)),
    "deleted variable of a closure": (unset_variable, lambda s: s[0](), lambda s: s[1]()),
    "bound method": (lambda: Thing(number=1.0).__call__, lambda s: s(), lambda s: _set("number", 2.0)(s.__self__)),
    "callable object": (lambda: Thing(number=1.0), lambda s: s(), _set("number", 2.0)),
    "slot": (Slotted, lambda s: s.number, _set("number", 2.0)),
    "inherited slot": (MoreSlotted, lambda s: s.number, _set("number", 2.0)),
    "behind a property": (Computed, lambda s: s.number, lambda s: _put(1, 1.0)(s._parts)),
    "cached property": (Cached, lambda s: s.number, _set("number", 5.0)),
    "input of a cached property": (Cached, lambda s: s.number, lambda s: (s.__dict__.pop("number", None), setattr(s, "start", 4.0))),
    "behind __getattr__": (Dynamic, lambda s: s.number, lambda s: _put("number", 2.0)(s.data)),
    "behind __getattribute__": (Secretive, lambda s: s.number, _set("number", 2.0)),
    "attribute dictionary": (lambda: AttributeDict(number=1.0), lambda s: s.number, _set("number", 2.0)),
    "nested attribute dictionary": (lambda: AttributeDict(a=AttributeDict(number=1.0)), lambda s: s.a.number, lambda s: _set("number", 2.0)(s.a)),
    "another __dict__": (lambda: Thing(number=1.0), lambda s: s.number, _new_dictionary),
    "another __class__": (Thing, lambda s: s.number, _new_class),
    "shadowed class attribute": (Thing, lambda s: s.number, _set("number", 2.0)),
    "deleted attribute": (lambda: Thing(number=2.0), lambda s: s.number, lambda s: delattr(s, "number")),
    "attribute of the class": (lambda: type("Local", (), {"number": 1.0})(), lambda s: s.number, lambda s: setattr(type(s), "number", 2.0)),
    "attribute of a base": (lambda: type("Local", (type("Base", (), {"number": 1.0}),), {})(), lambda s: s.number, lambda s: setattr(type(s).__mro__[1], "number", 2.0)),
    "attribute put between": (lambda: type("Local", (type("Base", (), {"number": 1.0}),), {})(), lambda s: s.number, lambda s: setattr(type(s), "number", 2.0)),
    "container of the class": (lambda: type("Local", (), {"numbers": [1.0]})(), lambda s: s.numbers[0], lambda s: _put(0, 2.0)(s.numbers)),
    "hasattr": (Thing, lambda s: 1.0 + hasattr(s, "extra"), _set("extra", True)),
    "getattr with a default": (Thing, lambda s: getattr(s, "extra", 1.0), _set("extra", 2.0)),
    "vars": (lambda: Thing(number=1.0), lambda s: sum(vars(s).values()), _set("more", 1.0)),
    "number of attributes": (lambda: Thing(number=1.0), lambda s: float(len(s.__dict__)), _set("more", 1.0)),
    "method of an object": (Methods, lambda s: s.first(), lambda s: setattr(s, "first", s.second)),
    "method of a class": (lambda: type("Local", (Methods,), {})(), lambda s: s.first(), lambda s: setattr(type(s), "first", Methods.second)),
    "static method": (lambda: type("Local", (Methods,), {})(), lambda s: s.fixed(), lambda s: setattr(type(s), "fixed", staticmethod(lambda: 2.0))),
    "class method": (lambda: type("Local", (Methods,), {})(), lambda s: s.of_class(), lambda s: setattr(type(s), "of_class", classmethod(lambda cls: 2.0))),
    "dataclass": (lambda: Settings(inner=Settings()), lambda s: s.inner.number, lambda s: _set("number", 2.0)(s.inner)),
    "replaced frozen dataclass": (lambda: Thing(settings=Frozen()), lambda s: s.settings.number, _set("settings", Frozen(2.0))),
    "forced frozen dataclass": (Frozen, lambda s: s.number, lambda s: object.__setattr__(s, "number", 2.0)),
    "object in a tuple": (lambda: (1, (2, Thing(number=1.0))), lambda s: s[1][1].number, lambda s: _set("number", 2.0)(s[1][1])),
    "object in a tuple of its own": (lambda: Pair((1, Thing(number=1.0))), lambda s: s[1].number, lambda s: _set("number", 2.0)(s[1])),
    "list in a tuple": (lambda: (1, [1.0]), lambda s: s[1][0], lambda s: _put(0, 2.0)(s[1])),
    "set": (lambda: {1, 2}, lambda s: float(len(s)), lambda s: s.add(3)),
    "exchanged in a set": (lambda: {1.0, 2.0}, lambda s: max(s), lambda s: (s.remove(2.0), s.add(3.0))),
    "replaced frozenset": (lambda: Thing(items=frozenset({1.0})), lambda s: max(s.items), _set("items", frozenset({2.0}))),
    "order of a dict": (lambda: {"a": 1.0, "b": 2.0}, lambda s: next(iter(s.values())), lambda s: s.__setitem__("a", s.pop("a"))),
    "order of an OrderedDict": (lambda: collections.OrderedDict(a=1.0, b=2.0), lambda s: next(iter(s.values())), lambda s: s.move_to_end("a")),
    "defaultdict": (lambda: collections.defaultdict(float, a=1.0), lambda s: s["a"], _put("a", 2.0)),
    "default of a defaultdict": (lambda: collections.defaultdict(lambda: 1.0), lambda s: s.get("a") or s.default_factory(), lambda s: setattr(s, "default_factory", lambda: 3.0)),
    "Counter": (lambda: collections.Counter(a=1), lambda s: s["a"], lambda s: s.update("a")),
    "ChainMap": (lambda: collections.ChainMap({}, {"a": 1.0}), lambda s: s["a"], lambda s: _put("a", 2.0)(s.maps[1])),
    "UserDict": (lambda: collections.UserDict(a=1.0), lambda s: s["a"], _put("a", 2.0)),
    "UserList": (lambda: Sequence([1.0]), lambda s: s[0], _put(0, 2.0)),
    "deque": (lambda: collections.deque([1.0, 2.0]), lambda s: s[0], lambda s: s.rotate(1)),
    "mapping proxy": (lambda: [d := {"a": 1.0}, types.MappingProxyType(d)], lambda s: s[1]["a"], lambda s: _put("a", 2.0)(s[0])),
    "simple namespaces": (lambda: types.SimpleNamespace(a=types.SimpleNamespace(number=1.0)), lambda s: s.a.number, lambda s: _set("number", 2.0)(s.a)),
    "argparse namespace": (lambda: argparse.Namespace(number=1.0), lambda s: s.number, _set("number", 2.0)),
    "swapped in a list": (lambda: [Thing(number=1.0), Thing(number=2.0)], lambda s: s[0].number, _swap),
    "appended": (lambda: [1.0], lambda s: float(len(s)), lambda s: s.append(1.0)),
    "emptied": (lambda: [3.0], lambda s: sum(s) + 1, lambda s: s.clear()),
    "one of two names": (_same_object_twice, lambda s: s[0].number * s[1].number, _split),
    "key of a dict": (lambda: {"a": 1.0}, lambda s: 1.0 + ("b" in s), _put("b", 0.0)),
    "object as a key": (lambda: {Colour.RED: 1.0}, lambda s: s[Colour.RED], _put(Colour.RED, 2.0)),
    "enumeration": (lambda: Thing(colour=Colour.RED), lambda s: s.colour.value, _set("colour", Colour.BLUE)),
    "a bool for a number": (lambda: Thing(number=1), lambda s: 1.0 + isinstance(s.number, bool), _set("number", True)),
    "a float for an int": (lambda: Thing(number=1), lambda s: 1.0 + isinstance(s.number, float), _set("number", 1.0)),
    "sign of zero": (lambda: Thing(number=0.0), lambda s: float(np.copysign(2.0, s.number)), _set("number", -0.0)),
    "not a number": (lambda: Thing(number=1.0), lambda s: 2.0 if s.number != s.number else 1.0, _set("number", float("nan"))),
    "None": (lambda: Thing(number=None), lambda s: s.number or 1.0, _set("number", 2.0)),
    "complex number": (lambda: Thing(number=1j), lambda s: abs(s.number), _set("number", 2j)),
    "fraction": (lambda: Thing(number=fractions.Fraction(1, 2)), lambda s: float(s.number), _set("number", fractions.Fraction(1, 4))),
    "range": (lambda: Thing(steps=range(3)), lambda s: float(len(s.steps)), _set("steps", range(4))),
    "slice": (lambda: Thing(part=slice(0, 1)), lambda s: float(len([1, 2, 3][s.part])), _set("part", slice(0, 2))),
    "text": (lambda: Thing(mode="one"), lambda s: 1.0 if s.mode == "one" else 2.0, _set("mode", "two")),
    "bytes": (lambda: Thing(data=b"a"), lambda s: float(s.data[0]), _set("data", b"b")),
    "path": (lambda: Thing(path=Path("a")), lambda s: float(len(str(s.path))), _set("path", Path("aaa"))),
    "dtype": (lambda: Thing(dtype=torch.float32), lambda s: 1.0 + (s.dtype is torch.float64), _set("dtype", torch.float64)),
    "class in a list": (lambda: [Thing], lambda s: s[0].number, _put(0, Other)),
    "function in a dict": (lambda: {"f": helper}, lambda s: s["f"](), _put("f", other_helper)),
    "lambda in a list": (lambda: [lambda: 1.0], lambda s: s[0](), _put(0, lambda: 2.0)),
    "state of an iterator": (lambda: Thing(it=itertools.count(1)), lambda s: copy.copy(s.it).__next__(), lambda s: next(s.it)),
    "operator.attrgetter": (lambda: [Thing(number=1.0), operator.attrgetter("number")], lambda s: s[1](s[0]), lambda s: _set("number", 2.0)(s[0])),
    "global number": (lambda: None, lambda s: _NUMBER, _call_global("_NUMBER", 2.0)),
    "global object": (lambda: _THING, lambda s: _THING.number, lambda s: _set("number", 2.0)(_THING)),
    "global list of objects": (lambda: _REGISTRY.append(Thing(number=1.0)), lambda s: _REGISTRY[-1].number, lambda s: _set("number", 2.0)(_REGISTRY[-1])),
    "global registry": (lambda: _TABLE.update(x=Thing(inner=Thing(number=1.0))), lambda s: _TABLE["x"].inner.number, lambda s: _set("number", 2.0)(_TABLE["x"].inner)),
    "global registry of functions": (lambda: _TABLE.update(f=helper), lambda s: _TABLE["f"](), lambda s: _TABLE.update(f=other_helper)),
    "global list of 300 numbers": (lambda: None, lambda s: _NUMBERS[-1], lambda s: _put(-1, 2.0)(_NUMBERS)),
    "class attribute of a global class": (lambda: None, lambda s: Thing.number, lambda s: setattr(Thing, "number", 3.0)),
    "attribute of a module": (lambda: setattr(_CONSTANTS, "number", 1.0), lambda s: _CONSTANTS.number, lambda s: setattr(_CONSTANTS, "number", 2.0)),
    "object in a module": (lambda: setattr(_CONSTANTS, "thing", Thing(number=1.0)), lambda s: _CONSTANTS.thing.number, lambda s: setattr(_CONSTANTS.thing, "number", 2.0)),
    "defaults of a helper": (lambda: None, _function, lambda s: setattr(helper, "__defaults__", (2.0,))),
    "mutable default": (lambda: None, _function, lambda s: collecting.__defaults__[0].__setitem__(0, 2.0)),
    "object in a keyword default": (lambda: None, _function, lambda s: setattr(collecting.__kwdefaults__["more"]["x"], "number", 2.0)),
    "code of a helper": (lambda: None, _function, lambda s: setattr(helper, "__code__", (lambda scale=1.0: scale * 3).__code__)),
    "helper": (lambda: None, _function, _call_global("helper", other_helper)),
    "context variable": (lambda: None, lambda s: _VARIABLE.get(), lambda s: _VARIABLE.set(2.0)),
    "variable of the thread": (lambda: setattr(_LOCAL, "number", 1.0), lambda s: _LOCAL.number, lambda s: setattr(_LOCAL, "number", 2.0)),
    "environment": (lambda: None, lambda s: float(os.environ.get("LOWTIDE_TEST_NUMBER", "1")), lambda s: os.environ.update(LOWTIDE_TEST_NUMBER="2")),
    "getenv": (lambda: None, lambda s: float(os.getenv("LOWTIDE_TEST_NUMBER", "1")), lambda s: os.environ.update(LOWTIDE_TEST_NUMBER="2")),
    "contents of a file": (_file, lambda s: float(s.read_text()), lambda s: s.write_text("2.25")),
    "file opened by name": (_file, read_file, lambda s: s.write_text("2.25")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals_as_before() -> Any:
    before = dict(globals())
    defaults = helper.__defaults__, helper.__code__
    yield
    globals().update(before)
    helper.__defaults__, helper.__code__ = defaults
    collecting.__defaults__[0][0] = 1.0  # type: ignore[index]
    collecting.__kwdefaults__["more"]["x"].number = 1.0
    Thing.number, _NUMBERS[-1], _THING.number = 1.0, 1.0, 1.0
    os.environ.pop("LOWTIDE_TEST_NUMBER", None)
    _VARIABLE.set(1.0)


UNCOPIED = ("memoryview", "mmap", "mapping proxy")  # refused


@pytest.mark.parametrize("name", UNCOPIED)
def test_what_cannot_be_copied_is_refused(name: str) -> None:
    make, read, _ = CASES[name]
    with pytest.raises(lowtide.CaptureError, match=r"cannot be copied \(TypeError"):
        lowtide.rematerialize(
            Reader(make(), read), (rows(),), budget="100%", planner="keep-all", on_capture_error="error"
        )


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNCOPIED])
def test_changes_between_steps(name: str) -> None:
    make, read, change = CASES[name]
    follows(Reader(make(), read), lambda model: (change(model.state), None)[1])

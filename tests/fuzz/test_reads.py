# ruff: noqa: E501
"""Changes between two steps of whatever Python code can read, in out-of-the-way places too."""

from __future__ import annotations

import abc
import collections
import contextvars
import decimal
import enum
import importlib
import io
import logging
import os
import sys
import threading
import types
import weakref
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from torch import nn

from tests.fuzz.changed import Computes, Reader, Thing, Turned, follows, rows


class Base:
    number = 1.0


class Derived(Base):
    @classmethod
    def of_class(cls) -> float:
        return cls.number


class Meta(type):
    number = 1.0


class OfMeta(metaclass=Meta):
    pass


class Special:
    def __call__(self) -> float:
        return 1.0

    def __getitem__(self, index: int) -> float:
        return 1.0

    def __len__(self) -> int:
        return 1


class Text(str):
    number: float = 1.0


class Member(enum.Enum):
    ONE = "one"

    @property
    def scale(self) -> float:
        return _SCALES[self]


class Same:
    """Equal to all with its key, whatever its weight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Locked:
    """As ConfigDict of ml_collections reads its own fields."""

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object.__getattribute__(self, "_fields")[name]


class Extra(pydantic.BaseModel):
    model_config = {"extra": "allow"}
    _private: float = pydantic.PrivateAttr(1.0)


class Virtual(abc.ABC):  # noqa: B024
    pass


class Below(Virtual):
    pass


class Given:
    """An argument of calls."""

    scale = 1.0

    @property
    def number(self) -> float:
        return _NUMBER


class Calls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


_NUMBER = 1.0
_SCALES: dict[Any, float] = {Member.ONE: 1.0}
_MODULE = types.ModuleType("a_module_of_constants")
_BUFFER = io.BytesIO(b"\1")
_EVENT = threading.Event()
_HELD: contextvars.ContextVar[Any] = contextvars.ContextVar("held", default={"number": 1.0})  # noqa: B039
_OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
_STRIDED = memoryview(bytearray(b"\1\1\2\2"))[::2]
_INTEGERS = torch.tensor([1, 3])
_DROPOUT = nn.Dropout(0.5)
_LOGGER = logging.getLogger("lowtide_fuzz")


def counted() -> float:
    return counted.number  # type: ignore[attr-defined]


def imported(state: Any) -> float:
    from a_module_of_constants import number

    return number


def scored(y: torch.Tensor) -> torch.Tensor:
    return y * _NUMBER


def _module_getattr(name: str) -> Any:
    return _SCALES[Member.ONE]


_LAZY = types.ModuleType("a_lazy_module")
_LAZY.__getattr__ = _module_getattr  # type: ignore[method-assign]


def _of_class(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: setattr(type(state), name, value)


def _proxied() -> Any:
    owner = Thing(number=1.0)
    return [owner, weakref.proxy(owner)]


def _local() -> Any:
    return type("Local", (Special,), {})()


def _element() -> Any:
    return ET.fromstring('<part number="1.0"/>')


def _subclass() -> Any:
    made = Text("a")
    made.number = 1.0
    return made


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
READ: dict[str, dict[str, Case]] = {
    "attributes of classes and modules": {
        "inherited, then overridden in a global class": (lambda: None, lambda s: Derived.number, lambda s: setattr(Derived, "number", 2.0)),
        "inherited, then overridden, in a class method": (lambda: type("Local", (Derived,), {})(), lambda s: s.of_class(), _of_class("number", 2.0)),
        "hasattr of a global class": (lambda: None, lambda s: 1.0 + hasattr(Derived, "more"), lambda s: setattr(Derived, "more", 2.0)),
        "getattr of a class by a computed name": (lambda: "num", lambda s: getattr(Base, s + "ber"), lambda s: setattr(Base, "number", 2.0)),
        "vars of a class": (lambda: None, lambda s: vars(Base)["number"], lambda s: setattr(Base, "number", 2.0)),
        "attribute of a metaclass": (lambda: None, lambda s: OfMeta.number, lambda s: setattr(Meta, "number", 2.0)),
        "getattr of a module": (lambda: setattr(_MODULE, "number", 1.0), lambda s: getattr(_MODULE, "num" + "ber"), lambda s: setattr(_MODULE, "number", 2.0)),
        "__getattr__ of a module": (lambda: None, lambda s: _LAZY.number, lambda s: _SCALES.update({Member.ONE: 2.0})),
        "bases of a class": (lambda: type("Local", (type("One", (Thing,), {"more": 1.0}),), {})(), lambda s: s.more, lambda s: setattr(type(s), "__bases__", (type("Two", (Thing,), {"more": 2.0}),))),
    },
    "variables and modules by other ways than their name": {
        "globals()": (lambda: None, lambda s: globals()["_NUMBER"], lambda s: globals().update(_NUMBER=2.0)),
        "from a module, in the function": (lambda: setattr(_MODULE, "number", 1.0), imported, lambda s: setattr(_MODULE, "number", 2.0)),
        "importlib": (lambda: setattr(_MODULE, "number", 1.0), lambda s: importlib.import_module("a_module_of_constants").number, lambda s: setattr(_MODULE, "number", 2.0)),
        "sys.modules": (lambda: setattr(_MODULE, "number", 1.0), lambda s: sys.modules["a_module_of_constants"].number, lambda s: setattr(_MODULE, "number", 2.0)),
        "global instead of a builtin": (lambda: [1.0, 2.0], lambda s: min(s), lambda s: globals().update(min=max)),
        "os.environb": (lambda: None, lambda s: float(os.environb.get(b"LOWTIDE_TEST_NUMBER", b"1")), lambda s: os.environ.update(LOWTIDE_TEST_NUMBER="2")),
        "os.path.expandvars": (lambda: os.environ.update(LOWTIDE_TEST_NUMBER="1"), lambda s: float(os.path.expandvars("$LOWTIDE_TEST_NUMBER")), lambda s: os.environ.update(LOWTIDE_TEST_NUMBER="2")),
    },
    "special methods": {
        "__call__": (_local, lambda s: s(), _of_class("__call__", lambda self: 2.0)),
        "__getitem__": (_local, lambda s: s[0], _of_class("__getitem__", lambda self, index: 2.0)),
        "__len__": (_local, lambda s: len(s), _of_class("__len__", lambda self: 2)),
        "new __getattr__": (_local, lambda s: getattr(s, "more", 1.0), _of_class("__getattr__", lambda self, name: 3.0 if name == "more" else object.__getattribute__(self, name))),
        "new __getattribute__": (lambda: type("Local", (), {"number": 1.0})(), lambda s: s.number, _of_class("__getattribute__", lambda self, name: 3.0 if name == "number" else object.__getattribute__(self, name))),
        "ABC.register": (lambda: None, lambda s: 1.0 + isinstance(1, Virtual), lambda s: Virtual.register(int)),
        "ABC.register of one that inherits": (lambda: None, lambda s: 1.0 + isinstance("", Virtual), lambda s: Below.register(str)),
    },
    "attributes of functions": {
        "attribute of a function": (lambda: setattr(counted, "number", 1.0), lambda s: counted.number, lambda s: setattr(counted, "number", 2.0)),
        "attribute of a function, in it": (lambda: setattr(counted, "number", 1.0), lambda s: counted(), lambda s: setattr(counted, "number", 2.0)),
        "attribute of a function in a list": (lambda: [counted, setattr(counted, "number", 1.0)], lambda s: s[0].number, lambda s: setattr(counted, "number", 2.0)),
    },
    "plain types with attributes, and members of enumerations": {
        "attribute of a text of its own class": (_subclass, lambda s: s.number, lambda s: setattr(s, "number", 2.0)),
        "attribute of an enumeration's member": (lambda: setattr(Member.ONE, "number", 1.0), lambda s: Member.ONE.number, lambda s: setattr(Member.ONE, "number", 2.0)),
        "property of an enumeration's member": (lambda: Member.ONE, lambda s: s.scale, lambda s: _SCALES.update({Member.ONE: 2.0})),
    },
    "objects of libraries": {
        "rate of an optimizer that is held": (lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), lambda s: s.param_groups[0]["lr"], lambda s: s.param_groups[0].update(lr=2.0)),
        "rate of a global optimizer": (lambda: None, lambda s: _OPTIMIZER.param_groups[0]["lr"], lambda s: _OPTIMIZER.param_groups[0].update(lr=2.0)),
        "scheduler": (lambda: torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), float), lambda s: s.last_epoch + 1.0, lambda s: setattr(s, "last_epoch", 3)),
        "distribution": (lambda: torch.distributions.Normal(0.0, 1.0), lambda s: float(s.scale), lambda s: setattr(s, "scale", torch.tensor(2.0))),
        "event": (lambda: None, lambda s: 1.0 + _EVENT.is_set(), lambda s: _EVENT.set()),
        "level of a logger": (lambda: _LOGGER.setLevel(10), lambda s: _LOGGER.level, lambda s: _LOGGER.setLevel(30)),
    },
    "containers": {
        "equal object in a set": (lambda: Thing(items={Same(1.0)}), lambda s: next(iter(s.items)).weight, lambda s: setattr(s, "items", {Same(2.0)})),
        "order of a set": (lambda: Thing(items={0, 8}), lambda s: next(iter(s.items)) + 1, lambda s: setattr(s, "items", {8, 0})),
        "a bool for a number in a set": (lambda: Thing(items={1}), lambda s: 1.0 + isinstance(next(iter(s.items)), bool), lambda s: setattr(s, "items", {True})),
        "longest length of a deque": (lambda: Thing(items=collections.deque([1.0], 2)), lambda s: s.items.maxlen, lambda s: setattr(s, "items", collections.deque([1.0], 3))),
        "mask of an array at its fill value": (lambda: np.ma.array([1.0, 2.0], mask=[0, 0], fill_value=2.0), lambda s: float(s.sum()), lambda s: s.__setitem__(1, np.ma.masked)),
        "one list under two names": (lambda: (lambda one: Thing(a=one, b=one))([1.0]), lambda s: 1.0 + (s.a is s.b), lambda s: setattr(s, "b", [1.0])),
        "dictionary's iterator": (lambda: iter({1.0: 2, 3.0: 4}), lambda s: s.__reduce__()[1][0][0], lambda s: next(s)),
        "dictionary in a context variable": (lambda: None, lambda s: _HELD.get()["number"], lambda s: _HELD.get().update(number=2.0)),
    },
    "objects of C": {
        "BytesIO": (lambda: io.BytesIO(b"\1"), lambda s: s.getvalue()[0], lambda s: s.getbuffer().__setitem__(0, 5)),
        "global BytesIO": (lambda: None, lambda s: _BUFFER.getvalue()[0], lambda s: _BUFFER.getbuffer().__setitem__(0, 5)),
        "StringIO": (lambda: io.StringIO("1"), lambda s: float(s.getvalue()), lambda s: s.write("2")),
        "element of XML": (_element, lambda s: float(s.get("number")), lambda s: s.set("number", "2.0")),
        "proxy": (_proxied, lambda s: s[1].number, lambda s: setattr(s[0], "number", 2.0)),
        "memoryview with steps": (lambda: None, lambda s: _STRIDED[1], lambda s: _STRIDED.__setitem__(1, 5)),
        "precision of decimals": (lambda: None, lambda s: decimal.Decimal(1) / 3, lambda s: setattr(decimal.getcontext(), "prec", 3)),
    },
    "reads past an object's class": {
        "object.__getattribute__": (lambda: Thing(number=1.0), lambda s: object.__getattribute__(s, "number"), lambda s: setattr(s, "number", 2.0)),
        "configuration that reads itself so": (lambda: Locked(part=Locked(number=1.0)), lambda s: s.part.number, lambda s: s.part._fields.update(number=2.0)),
        "private attribute of pydantic's": (Extra, lambda s: s._private, lambda s: setattr(s, "_private", 2.0)),
        "extra attribute of pydantic's": (lambda: Extra(number=1.0), lambda s: s.number, lambda s: setattr(s, "number", 2.0)),
    },
}  # fmt: skip


def _same(self: Any, y: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    return y


def _held(self: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return self.held[0](y)


def _with(**attributes: Callable[[], Any]) -> Callable[[Any], None]:
    def prepare(module: Any) -> None:
        for name, make in attributes.items():
            setattr(module, name, make())

    return prepare


_ONES, _INTS = _with(table=lambda: torch.ones(4)), _with(table=lambda: torch.tensor([1, 3]))
_NUMBERED = _with(number=lambda: 1.0)
MADE: dict[str, dict[str, Any]] = {
    "the backward pass": {
        "attribute that a backward pass reads": (lambda s, y, x: Turned.apply(y, s), _NUMBERED, lambda m: setattr(m, "number", 2.0)),
        "attribute that a gradient's hook reads": (lambda s, y, x: (y.register_hook(lambda g: g * s.number), y)[1], _NUMBERED, lambda m: setattr(m, "number", 2.0)),
    },
    "modules that are not registered": {
        "evaluation mode": (_held, _with(held=lambda: [nn.Dropout(0.5)]), lambda m: m.held[0].eval()),
        "evaluation mode of a global module": (lambda s, y, x: _DROPOUT(y), None, lambda m: _DROPOUT.eval()),
        "hook": (_held, _with(held=lambda: [Calls()]), lambda m: m.held[0].register_forward_hook(lambda m, a, o: o * 2)),
        "part": (_held, _with(held=lambda: [nn.Sequential(nn.Tanh())]), lambda m: m.held[0].__setitem__(0, nn.ReLU())),
        "part more": (_held, _with(held=lambda: [nn.Sequential(nn.Tanh())]), lambda m: m.held[0].append(nn.ReLU())),
    },
    "classes of modules": {
        "class of the model": (_same, None, lambda m: setattr(m, "__class__", type("Other", (Computes,), {"forward": lambda self, x: self.linear(x).sum() * 3}))),
        "__call__ of a part's class": (lambda s, y, x: s.part(y), _with(part=lambda: type("Local", (Calls,), {})()), lambda m: setattr(type(m.part), "__call__", lambda self, x: x * 2)),
    },
    "attributes of tensors": {
        "attribute of a plain tensor": (lambda s, y, x: y * getattr(s.table, "number", 1.0), _ONES, lambda m: setattr(m.table, "number", 2.0)),
        "requires_grad of a plain tensor": (lambda s, y, x: y * (1 + s.table.requires_grad), _ONES, lambda m: m.table.requires_grad_()),
        "offset of a buffer": (lambda s, y, x: y * (1 + s.table.storage_offset()), lambda m: m.register_buffer("table", torch.ones(4)), lambda m: setattr(m, "table", torch.ones(5)[1:])),
    },
    "constant tensors": {
        "tolist": (lambda s, y, x: y[: s.table.tolist()[0]], _INTS, lambda m: m.table.fill_(2)),
        "tolist of a global tensor": (lambda s, y, x: y[: _INTEGERS.tolist()[0]], None, lambda m: _INTEGERS.fill_(2)),
        "text": (lambda s, y, x: y * len(str(s.table)), _ONES, lambda m: m.table.fill_(30000)),
        "numpy": (lambda s, y, x: y * float(s.table.numpy()[0]), _ONES, lambda m: m.table.fill_(2)),
        "np.asarray": (lambda s, y, x: y * float(np.asarray(s.table)[0]), _ONES, lambda m: m.table.fill_(2)),
        "length": (lambda s, y, x: y * len(s.table), _with(table=lambda: torch.ones(1)), lambda m: setattr(m.table, "data", torch.ones(3))),
        "resized": (lambda s, y, x: y * s.table.numel(), _ONES, lambda m: m.table.resize_(7).fill_(1)),
        "data of another dtype": (lambda s, y, x: y * s.table, _ONES, lambda m: setattr(m.table, "data", torch.full((4,), 2.0, dtype=torch.float64))),
        "data of another shape, of a parameter that is not registered": (lambda s, y, x: y * s.held[0], _with(held=lambda: [nn.Parameter(torch.ones(4))]), lambda m: (setattr(m.held[0], "grad", None), setattr(m.held[0], "data", torch.full((1,), 2.0)))),
    },
}  # fmt: skip


def _cases(groups: dict[str, dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=name) for cases in groups.values() for name, case in cases.items()]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "a_module_of_constants", _MODULE)
    before = dict(globals())
    yield
    for name in {*globals()} - {*before}:
        del globals()[name]
    globals().update(before)
    os.environ.pop("LOWTIDE_TEST_NUMBER", None)
    Base.number, Meta.number, Given.scale, decimal.getcontext().prec = 1.0, 1.0, 1.0, 28
    for kind, name in ((Derived, "number"), (Derived, "more")):
        if name in vars(kind):
            delattr(kind, name)
    _SCALES[Member.ONE] = 1.0
    _DROPOUT.train()
    _INTEGERS.copy_(torch.tensor([1, 3]))


@pytest.mark.parametrize("case", _cases(READ))
def test_what_is_read(case: Case) -> None:
    make, read, change = case
    follows(Reader(make(), read), lambda model: (change(model.state), None)[1])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("case", _cases(MADE))
def test_what_modules_are_made_of(case: Any) -> None:
    compute, prepare, change = case
    follows(Computes(compute, prepare or (lambda module: None)), lambda model: (change(model), None)[1])


ARGUMENTS: dict[str, dict[str, Any]] = {
    "arguments": {
        "class attribute": (lambda s, y, x, o: y * o.scale, Given, lambda: setattr(Given, "scale", 2.0)),
        "global in a property": (lambda s, y, x, o: y * o.number, Given, lambda: globals().update(_NUMBER=2.0)),
        "global in a function": (lambda s, y, x, o: o(y), lambda: scored, lambda: globals().update(_NUMBER=2.0)),
        "attribute of a module": (lambda s, y, x, o: y * o.number, Calls, lambda: setattr(Calls, "number", 2.0)),
    }
}


@pytest.mark.parametrize("case", _cases(ARGUMENTS))
def test_what_arguments_are(case: Any) -> None:
    compute, make, change = case
    Calls.number = 1.0  # type: ignore[attr-defined]
    follows(Computes(compute), lambda model: change(), (rows(), make()))


PLACES: dict[str, dict[str, Any]] = {
    "files": {
        "exists": (lambda path: 1.0 + path.exists(), lambda path: path.write_text("1.0")),
        "entries": (lambda path: 1.0 + len(os.listdir(path.parent)), lambda path: path.write_text("1.0")),
        "size": (
            lambda path: float(path.stat().st_size) if path.exists() else 1.0,
            lambda path: path.write_text("1.0"),
        ),
        "working directory": (lambda path: float(len(os.getcwd())), lambda path: os.chdir(path.parent)),
    }
}


@pytest.mark.parametrize("case", _cases(PLACES))
def test_where_files_are(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = case
    monkeypatch.chdir("/")
    follows(Reader(tmp_path / "number.txt", read), lambda model: (change(model.state), None)[1])

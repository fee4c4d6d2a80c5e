# ruff: noqa: E501
"""Between two steps something changes where no plain read of an attribute leads: what has another one's place in a module's own
dictionary, attributes of functions that had none, and what modules and classes hold under names that code computes."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.capture.trace import classes
from tests.fuzz.changed import Computes, Reader, Thing, follows, having, part_of, rows, same, step, steps

_MODULE = types.ModuleType("constants_of_a_test")
_LIST = [1.0]


class Config:
    list_a = _LIST
    table: dict[str, Any] = {"k": _LIST}

    class Inner:
        values = _LIST


class Calls:
    pass


def first() -> float:
    return _LIST[0]


def plain() -> float:
    return 1.0


def counting() -> float:
    """One more in every call."""
    counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]
    return float(counting.calls)  # type: ignore[attr-defined]


def counting_in_a_class() -> float:
    Calls.calls = getattr(Calls, "calls", 0) + 1  # type: ignore[attr-defined]
    return float(Calls.calls)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    vars(_MODULE).update(list_a=_LIST, table={"k": _LIST}, thing=Thing(number=1.0), first=first)
    yield
    _LIST[:] = [1.0]
    for function in (plain, counting):
        vars(function).clear()
    if "calls" in vars(Calls):
        del Calls.calls  # type: ignore[attr-defined]


READ: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list of a module": ("a", lambda s: getattr(_MODULE, "list_" + s)[0]),
    "function of a module": ("st", lambda s: getattr(_MODULE, f"fir{s}")()),
    "dictionary of a module": ("table", lambda s: vars(_MODULE)[s]["k"][0]),
    "attributes of a module": ("table", lambda s: _MODULE.__dict__[s]["k"][0]),
    "members of a module": ("table", lambda s: dict(inspect.getmembers(_MODULE))[s]["k"][0]),
    "list of a class": ("a", lambda s: getattr(Config, "list_" + s)[0]),
    "dictionary of a class": ("table", lambda s: vars(Config)[s]["k"][0]),
    "nested classes": (["Inner", "values"], lambda s: functools.reduce(getattr, s, Config)[0]),
    "class of an object": ([Config(), "list_a"], lambda s: getattr(type(s[0]), s[1])[0]),
}


@pytest.mark.parametrize("name", READ)
def test_names_that_code_computes(name: str) -> None:
    state, read = READ[name]
    follows(Reader(state, read), lambda model: _LIST.__setitem__(0, 2.0))


def test_the_names_in_a_module() -> None:
    model = Reader("list_", lambda s: len([name for name in dir(_MODULE) if name.startswith(s)]))
    follows(model, lambda model: setattr(_MODULE, "list_b", _LIST))
    del _MODULE.list_b  # type: ignore[attr-defined]


def test_names_that_code_spells_are_read_alone() -> None:
    """What else is in the class is of no consequence."""
    model = Reader(None, lambda s: getattr(Config, "number", 1.0))
    lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all")
    for number in (2.0, 3.0):
        Config.table["k"] = [number]
        model(rows()).backward()
    assert len(lowtide.plans(model)) == 1
    Config.table["k"] = _LIST


@pytest.mark.parametrize("read", [lambda s: getattr(plain, "k", 1.0), lambda s: getattr(s[0], "k", 1.0)])
def test_a_function_gets_its_first_attribute(read: Callable[[Any], Any]) -> None:
    follows(Reader([plain], read), lambda model: setattr(plain, "k", 2.0))


@pytest.mark.parametrize("count", [counting, counting_in_a_class])
def test_counters_that_the_first_call_makes(count: Callable[[], float]) -> None:
    def made() -> nn.Module:
        vars(counting).clear()
        if "calls" in vars(Calls):
            del Calls.calls  # type: ignore[attr-defined]
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Reader(None, lambda s: count()))

    plain, planned = (steps(made, planned=planned) for planned in (False, True))
    assert all(torch.equal(*pair) for each in zip(plain, planned, strict=True) for pair in zip(*each, strict=True))


class _Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


IN_PLACE_OF: dict[str, tuple[Any, Any, str, Callable[[], Any]]] = {
    "a submodule": (part_of, having(part=nn.Tanh), "part", _Doubling),
    "a parameter": (lambda s, y, x: y * s.table, having(table=lambda: nn.Parameter(torch.ones(4))), "table", rows),
    "a buffer": (lambda s, y, x: y * s.table, lambda m: m.register_buffer("table", torch.ones(4)), "table", rows),
}


@pytest.mark.parametrize("what", IN_PLACE_OF)
def test_attributes_that_come_before_what_is_registered(what: str) -> None:
    compute, prepare, name, make = IN_PLACE_OF[what]
    follows(Computes(compute, prepare), lambda model: vars(model).update({name: make()}))


INHERITED: dict[str, tuple[Callable[..., torch.Tensor], str, Any]] = {
    "extra_repr": (lambda s, y, x: y * len(str(s.part)), "extra_repr", lambda: "of another length"),
    "_get_name": (lambda s, y, x: y * len(repr(s.part)), "_get_name", lambda: "Another"),
    "parameters": (lambda s, y, x: y * len([*s.part.parameters()]), "parameters", lambda: [torch.ones(1)] * 3),
    "state_dict": (lambda s, y, x: y * len(s.part.state_dict()), "state_dict", lambda: dict.fromkeys("abc")),
}


@pytest.mark.parametrize("what", INHERITED)
def test_a_submodule_gets_a_method_of_its_own_for_one_that_all_modules_have(what: str) -> None:
    compute, name, method = INHERITED[what]
    model = Computes(compute, having(part=lambda: nn.Linear(4, 4)))
    follows(model, lambda model: setattr(model.part, name, method))


class Kept:
    """Keeps what its method gave it first."""

    number = 1.0

    @functools.cache  # noqa: B019
    def first(self) -> float:
        return self.number


class _Keeps(Kept, nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.first()


@functools.lru_cache(maxsize=2)
def twice(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach() * 2


def _grown(model: Any) -> None:
    with torch.no_grad():
        model.linear.bias.add_(1.0)


KEPT: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "for a module": (part_of, having(part=_Keeps), lambda model: setattr(model.part, "number", 2.0)),
    "for an object": (
        lambda s, y, x: y * s.kept.first(),
        having(kept=Kept),
        lambda model: setattr(model.kept, "number", 2.0),
    ),
    "for a parameter": (lambda s, y, x: y * twice(s.linear.bias), having(), _grown),
}


@pytest.mark.parametrize("what", KEPT)
def test_results_that_functools_keeps(what: str) -> None:
    """Eager finds the first one again, whatever has changed since."""
    compute, prepare, change = KEPT[what]
    torch.manual_seed(0)
    model = Computes(compute, prepare)
    lowtide.rematerialize(model, (rows(),), budget="100%")
    for _ in range(3):
        found = step(model, (rows(),), plain=False)
        assert same(found, step(model, (rows(),), plain=True))
        change(model)


def test_results_that_functools_keeps_for_numbers() -> None:
    model = Computes(lambda s, y, x: y * doubled(x.shape[0]))
    lowtide.plan(model, (rows(),), budget="100%")  # it is one program


@functools.cache
def doubled(number: int) -> float:
    return number * 2.0


_SCALE = 1.0


def test_code_that_may_read_all_names_leaves_them_as_they_were() -> None:
    """While a model is captured, ``type`` is another function in modules whose code asks for classes. To code that may ask its
    module for any name that is none, and it is gone afterwards."""

    def read(state: Any) -> float:
        module = importlib.import_module(__name__)
        return float(getattr(module, state.name)) + (type(state.name) is str)

    before = dict(globals())
    state = Thing(name="_SCALE")
    follows(Reader(state, read), lambda model: globals().update(_SCALE=2.0))
    globals()["_SCALE"] = 1.0
    assert globals().keys() == before.keys()


def test_a_class_that_forward_makes_is_of_the_module_that_does() -> None:
    """``type`` in its code is this one while it is captured."""
    assert classes.Type("Made", (), {}).__module__ == type("Made", (), {}).__module__ == __name__
    assert classes.Type("Made", (), {"__module__": "other"}).__module__ == "other"


def _through_metaclass() -> Any:
    meta = type("Meta", (type,), {"number": property(lambda kind: kind.held)})
    return types.new_class("Made", (), {"metaclass": meta}, lambda names: names.update(held=1.0))


MADE_BY_PYTHON: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "types.new_class": (_through_metaclass, lambda s: s.number, lambda s: setattr(s, "held", 2.0)),
    "ABCMeta": (lambda: abc.ABCMeta("Made", (), {"number": 1.0}), lambda s: s().number, lambda s: setattr(s, "number", 2.0)),
    "dataclasses.make_dataclass": (lambda: dataclasses.make_dataclass("Made", [("number", float, 1.0)]), lambda s: s().number, lambda s: setattr(s.__init__, "__defaults__", (2.0,))),
    "annotations by typing": (lambda: type("Made", (), {"__annotations__": {"a": int}}), lambda s: len(typing.get_type_hints(s)), lambda s: s.__annotations__.update(b=int)),
    "annotations by inspect": (lambda: type("Made", (), {"__annotations__": {"a": int}}), lambda s: len(inspect.get_annotations(s)), lambda s: s.__annotations__.update(b=int)),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_BY_PYTHON)
def test_classes_that_functions_of_python_make(name: str) -> None:
    make, read, change = MADE_BY_PYTHON[name]
    follows(Reader(make(), read), lambda model: (change(model.state), None)[1])


class _Normed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (4,)) * x


OF_FUNCTIONS: dict[str, tuple[Any, Callable[[Any], Any], Any, str, Any]] = {
    "defaults of one that code calls": (_Normed, lambda y: y, F.layer_norm, "__defaults__", (None, None, 0.5)),
    "code of one that a layer calls": (nn.Hardtanh, lambda y: y, F.hardtanh, "__code__", (lambda input, min_val=-1.0, max_val=1.0, inplace=False: input * 2).__code__),
    "code of one of PyTorch's": (nn.Identity, lambda y: torch.meshgrid(y[0], y[1], indexing="ij")[0], torch.meshgrid, "__code__", (lambda *tensors, indexing=None: tensors).__code__),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_what_functions_of_libraries_are_made_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, compute, function, attribute, value = OF_FUNCTIONS[name]
    model = Computes(lambda s, y, x: compute(s.part(y)), having(part=kind))
    follows(model, lambda m: monkeypatch.setattr(function, attribute, value))

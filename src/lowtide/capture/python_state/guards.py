"""What a program depends on that no argument of the call shows: plain attributes, hooks and submodules of the model.

While a model is captured, the attributes that its forward pass reads are noted (``accesses``). ``Guards`` keeps what they were
in the model itself, along with every module's class, children and hooks, and tells later whether all of it is still so:
numbers, strings, arrays and containers of such are compared by value, and everything else is the very same object. An object
that is no module and no tensor, such as a configuration, is looked into, and so are the objects that it holds. Variables
outside of the model that its code names are guarded as well (``capture.variables``).
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state.outside import hooks_of
from lowtide.capture.python_state.paths import ABSENT, DEPTH, MOST_OBJECTS, OWN, Place, locate, named
from lowtide.capture.python_state.variables import Variable, variables_of
from lowtide.program import structure
from lowtide.program.keys import tensor_key

_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce_ex__"})  # whoever reads these reads all attributes
_ASKING = (nn.Module.__module__, "functools")  # who reads them to find one
_INHERITED = frozenset(vars(nn.Module)) - {"forward"} - _WHOLE

_LOCK = threading.Lock()
_WATCHED: dict[int, tuple[Access, int]] = {}  # a module's id -> what is noted of its model, its number
_replaced: dict[str, Any] = {}  # what nn.Module had itself for the methods that note


@dataclass(frozen=True, slots=True)
class Access:
    """Attributes of modules, by the number of the module: which were read, before they were written, and which were written."""

    read: set[tuple[int, str]] = field(default_factory=set)
    written: set[tuple[int, str]] = field(default_factory=set)


@contextlib.contextmanager
def accesses(model: nn.Module) -> Iterator[Access]:
    """Inside, what is read and written of the modules of ``model`` is noted."""
    found = Access()
    numbers = {id(module): (found, number) for number, module in enumerate(model.modules())}
    with _LOCK:
        if not _WATCHED:
            for name, method in _NOTING.items():
                _replaced[name] = vars(nn.Module).get(name, ABSENT)
                setattr(nn.Module, name, method)
        _WATCHED.update(numbers)
    try:
        yield found
    finally:
        with _LOCK:
            for key in numbers:
                del _WATCHED[key]
            if not _WATCHED:
                for name, method in _replaced.items():
                    delattr(nn.Module, name) if method is ABSENT else setattr(nn.Module, name, method)


def _read(module: nn.Module, name: str) -> Any:
    watched = _WATCHED.get(id(module))
    if watched is not None and not (name in _WHOLE and sys._getframe(1).f_globals.get("__name__") in _ASKING):
        place = (watched[1], name)
        if place not in watched[0].written:
            watched[0].read.add(place)
    method = _replaced["__getattribute__"]
    return super(nn.Module, module).__getattribute__(name) if method is ABSENT else method(module, name)


def _write(module: nn.Module, name: str, value: Any) -> None:
    watched = _WATCHED.get(id(module))
    if watched is not None:
        watched[0].written.add((watched[1], name))
    method = _replaced["__setattr__"]
    super(nn.Module, module).__setattr__(name, value) if method is ABSENT else method(module, name, value)


_NOTING = {"__getattribute__": _read, "__setattr__": _write}


Outer = Sequence[tuple[Variable, Any]]


def outer_variables(model: nn.Module) -> Outer:
    """The variables outside of the model that its code names, and what they are now."""
    keeper = _Keeper(model, (), (), {})
    return [(variable, keeper.kept(variable.value(), DEPTH)) for variable in variables_of(model)]


@dataclass(frozen=True, slots=True)
class Guards:
    """``wiring``: of the modules, in order, see ``_wiring``. ``values``: of a module by its number, names of attributes and
    what they were. ``shared``: the same for classes, of which modules have some attributes; ``outer``: for variables outside of
    the model."""

    wiring: tuple[Any, ...] = ()
    values: tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = ()
    shared: tuple[tuple[type, str, Any], ...] = ()
    outer: Outer = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        read: set[tuple[int, str]],
        but: Collection[Place] = (),
        followed: Sequence[torch.Tensor] = (),
        after: Collection[tuple[Place, Any]] = (),
        outer: Outer = (),
    ) -> Guards:
        """``read``: as ``accesses`` found them; ``but``: attributes that may be anything; ``followed``: tensors whose
        layout alone matters; ``after``: other values than the model has now; ``outer``: what ``outer_variables`` were before
        the model ran: those that it left alone are guarded."""
        modules = list(model.modules())
        names: dict[int, set[str]] = {}
        for number, name in read:
            names.setdefault(number, set()).update(vars(modules[number]) if name in _WHOLE else (name,))
        free = {_owned(model, place) for place in (("", "forward"), *but)}
        layouts = set(map(id, followed))
        keeper, values = _Keeper(model, free, layouts, {_owned(model, place): value for place, value in after}), []
        shared: dict[tuple[type, str], Any] = {}
        for number, module in enumerate(modules):
            wanted = [key for key in sorted(names.get(number, ())) if _matters(module, key)]
            own = keeper.chosen(module, {key: vars(module).get(key, ABSENT) for key in wanted})
            values.append((number, tuple((key, keeper.kept(value)) for key, value in own.items())))
            for key, value in own.items():
                if value is ABSENT:
                    shared[type(module), key] = keeper.kept(_of_class(type(module), key))
        left = tuple((variable, kept) for variable, kept in outer if _same(kept, variable.value()))
        return cls(_wiring(modules), tuple(values), tuple((*place, kept) for place, kept in shared.items()), left)

    def hold(self, modules: Sequence[nn.Module]) -> bool:
        """Whether everything is as it was; ``modules`` are all of the model's."""
        if _wiring(modules) != self.wiring:
            return False
        for number, items in self.values:
            own = modules[number].__dict__
            for name, kept in items:
                value = own.get(name, ABSENT)
                if value is not kept and not _same(kept, value):
                    return False
        return all(_same(kept, _of_class(kind, name)) for kind, name, kept in self.shared) and all(
            _same(kept, variable.value()) for variable, kept in self.outer
        )

    def other_tensors(self, model: nn.Module) -> set[Place]:
        """Attributes whose tensors are not those that they were."""
        names, modules = zip(*model.named_modules(), strict=True)
        return {
            (names[number], key)
            for number, items in self.values
            if number < len(modules)
            for key, kept in items
            if not _same(kept, vars(modules[number]).get(key, ABSENT))
            and structure.flatten(vars(modules[number]).get(key))[0]
        }

    def broken(self, model: nn.Module) -> str:
        """In words, what is not as it was."""
        names, modules = zip(*model.named_modules(), strict=True)
        now = _wiring(modules)
        if len(now) != len(self.wiring):
            return f"{len(now)} modules instead of {len(self.wiring)}"
        found = []
        for name, (kind, children, hooks), (old_kind, old_children, old_hooks) in zip(
            names, now, self.wiring, strict=True
        ):
            where = name or type(model).__name__
            if kind is not old_kind:
                found.append(f"{where} is a {kind.__name__}")
            elif hooks != old_hooks:
                found.append(f"{where} has other hooks")
            elif children != old_children:
                found.append(f"{where} has other submodules")
        for number, items in self.values:
            own, where = vars(modules[number]), names[number] or type(model).__name__
            changed = [(key, own.get(key, ABSENT)) for key, kept in items if not _same(kept, own.get(key, ABSENT))]
            found += [f"{where}.{key} is {_shown(value)}" for key, value in changed]
        for kind, name, kept in self.shared:
            if not _same(kept, _of_class(kind, name)):
                found.append(f"{kind.__name__}.{name} is {_shown(_of_class(kind, name))}")
        for variable, kept in self.outer:
            if not _same(kept, variable.value()):
                found.append(f"{variable.text} is {_shown(variable.value())}")
        return named(found)


def _wiring(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Of each module its class, its children by name and number, and its hooks. Class and hooks of the model itself are around
    its planned forward."""
    numbers = {id(module): number for number, module in enumerate(modules)}
    root = modules[0]
    return tuple(
        (
            None if module is root else type(module),
            tuple((name, numbers.get(id(child))) for name, child in module._modules.items()) if module._modules else (),
            () if module is root else hooks_of(module),
        )
        for module in modules
    )


def _matters(module: nn.Module, name: str) -> bool:
    """Parameters and buffers are arguments of the program, and submodules are guarded by themselves."""
    own = vars(module)
    registered = any(name in own[registry] for registry in ("_parameters", "_buffers", "_modules"))
    return not registered and name not in OWN and name not in _WHOLE and (name in own or name not in _INHERITED)


def _of_class(kind: type, name: str) -> Any:
    """What a class or one of its bases has under the name, as it stands there."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), ABSENT)


@dataclass(frozen=True, slots=True)
class _Items:
    """A container, and what was in it."""

    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Array:
    copy: Any


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor of this layout."""

    key: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A module that is not registered, and its parameters and buffers."""

    module: nn.Module
    tensors: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Object:
    """An object, and its attributes but for those that may be anything."""

    value: Any
    attributes: dict[str, Any]
    free: frozenset[str]


class _Keeper:
    """Makes what is remembered of values; every object is looked into once. ``free``: attributes, by the id of their owner,
    that may be anything; ``layouts``: ids of tensors whose layout matters; ``instead``: other values for some attributes."""

    def __init__(
        self,
        model: nn.Module,
        free: Collection[tuple[int, str]],
        layouts: Collection[int],
        instead: Mapping[tuple[int, str], Any],
    ) -> None:
        self.seen: dict[int, Any] = {}
        self.registered = set(map(id, model.modules()))
        self.free = free
        self.layouts = layouts
        self.instead = instead

    def chosen(self, owner: Any, own: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of ``owner`` that must stay as they are, and as what."""
        return {
            name: self.instead.get((id(owner), name), value)
            for name, value in own.items()
            if (id(owner), name) not in self.free
        }

    def kept(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, structure.CONTAINERS):
            return _Items(type(value), tuple(self.kept(item, depth) for item in structure.items(value)))
        if structure.is_comparable(value):
            return _Array(value.copy())
        if isinstance(value, nn.Module) and id(value) not in self.registered:
            return _Hidden(value, structure.state_of(value))
        if id(value) in self.layouts:
            return _Layout(tensor_key(value))
        method = isinstance(value, types.MethodType)
        if depth == DEPTH or len(self.seen) == MOST_OBJECTS or not (method or structure.is_open(value)):
            return value
        if id(value) in self.seen:
            return value
        self.seen[id(value)] = value
        own = _fields(value)
        added = {name: item for (owner, name), item in self.instead.items() if owner == id(value)}
        chosen = self.chosen(value, {**own, **added})
        attributes = {name: self.kept(item, depth + 1) for name, item in chosen.items() if item is not ABSENT}
        return _Object(value, attributes, frozenset(name for owner, name in self.free if owner == id(value)))


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object; of a bound method, its object."""
    return {"__self__": value.__self__} if isinstance(value, types.MethodType) else structure.fields(value)


def _owned(model: nn.Module, place: Place) -> tuple[int, str]:
    owner, name = locate(model, place) or (None, "")
    return id(owner), name


def _same(kept: Any, value: Any) -> bool:
    if kept is value:
        return True
    if isinstance(kept, _Items):
        if type(value) is not kept.kind:
            return False
        now = structure.items(value)
        same = len(now) == len(kept.items)
        return _identical(kept.items, now) or (same and all(map(_same, kept.items, now)))
    if isinstance(kept, _Object):
        if value is not kept.value and not _same_method(kept.value, value):
            return False
        own = _fields(value)
        return own.keys() - kept.free == kept.attributes.keys() and all(
            _same(item, own[name]) for name, item in kept.attributes.items()
        )
    if isinstance(kept, _Hidden):
        return value is kept.module and _identical(kept.tensors, structure.state_of(value))
    if isinstance(kept, _Layout):
        return isinstance(value, torch.Tensor) and tensor_key(value) == kept.key
    if isinstance(kept, _Array):
        return isinstance(value, np.ndarray) and value.dtype == kept.copy.dtype and _equal(kept.copy, value)
    if type(kept) is not type(value) or not isinstance(kept, (*structure.PLAIN, np.generic)):
        return _same_method(kept, value)
    return bool(kept == value or (kept != kept and value != value))


def _identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _same_method(one: Any, other: Any) -> bool:
    """Bound methods are made anew where they are read."""
    return (
        isinstance(one, types.MethodType)
        and isinstance(other, types.MethodType)
        and one.__func__ is other.__func__
        and one.__self__ is other.__self__
    )


def _equal(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> bool:
    return one.shape == two.shape and one.tobytes() == two.tobytes()


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    return repr(value) if isinstance(value, structure.PLAIN) else f"another {type(value).__name__}"

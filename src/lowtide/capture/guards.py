"""What a program depends on that no argument of the call shows: plain attributes, hooks and submodules of the model.

While a model is captured, the attributes that its forward pass reads are noted (``reads``). ``Guards`` keeps what they were
in the model itself, along with every module's class, children and hooks, and tells later whether all of it is still so:
numbers, strings, arrays and containers of such are compared by value, and everything else is the very same object. An object
that is no module and no tensor, such as a configuration, is looked into, and so are the objects that it holds.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.capture import structure
from lowtide.capture.attributes import OWN, Assigned, named

_ABSENT = object()
_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce_ex__"})  # whoever reads these reads all attributes
_ASKING = (nn.Module.__module__, "functools")  # who reads them to find one
_INHERITED = frozenset(vars(nn.Module)) - {"forward"} - _WHOLE
_CONTAINERS = (list, tuple, deque, set, frozenset, dict)
_CLOSED = (nn.Module, torch.Tensor, types.ModuleType, types.FunctionType, type)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 3  # of objects in objects
_MOST_OBJECTS = 256  # that are looked into
_MOST_BYTES = 1 << 24  # of an array that is compared

_LOCK = threading.Lock()
_WATCHED: dict[int, tuple[set[tuple[int, str]], int]] = {}  # a module's id -> the places read, its number
_replaced: Any = _ABSENT  # what nn.Module had for __getattribute__ itself


@contextlib.contextmanager
def reads(model: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Inside, the attributes of the modules of ``model`` that are read are added to the set: number of the module, name."""
    global _replaced
    found: set[tuple[int, str]] = set()
    numbers = {id(module): (found, number) for number, module in enumerate(model.modules())}
    kind: Any = nn.Module
    with _LOCK:
        if not _WATCHED:
            _replaced = vars(kind).get("__getattribute__", _ABSENT)
            kind.__getattribute__ = _noting
        _WATCHED.update(numbers)
    try:
        yield found
    finally:
        with _LOCK:
            for key in numbers:
                del _WATCHED[key]
            if not _WATCHED and _replaced is _ABSENT:
                del kind.__getattribute__
            elif not _WATCHED:
                kind.__getattribute__ = _replaced


def _noting(module: nn.Module, name: str) -> Any:
    watched = _WATCHED.get(id(module))
    if watched is not None and not (name in _WHOLE and sys._getframe(1).f_globals.get("__name__") in _ASKING):
        watched[0].add((watched[1], name))
    if _replaced is not _ABSENT:
        return _replaced(module, name)
    return super(nn.Module, module).__getattribute__(name)


@dataclass(frozen=True, slots=True)
class Guards:
    """``wiring``: of the modules, in order, see ``_wiring``. ``values``: of a module by its number, names of attributes and
    what they were. ``shared``: the same for classes, of which modules have some attributes."""

    wiring: tuple[Any, ...] = ()
    values: tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = ()
    shared: tuple[tuple[type, str, Any], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, read: set[tuple[int, str]], but: Sequence[Assigned] = ()) -> Guards:
        """``read``: as ``reads`` found them; ``but``: attributes that planned calls write themselves."""
        modules = list(model.modules())
        names: dict[int, set[str]] = {}
        for number, name in read:
            names.setdefault(number, set()).update(vars(modules[number]) if name in _WHOLE else (name,))
        own = {("", "forward"), *((place.path, place.name) for place in but)}
        keeper, values = _Keeper(), []
        shared: dict[tuple[type, str], Any] = {}
        for number, (path, module) in enumerate(model.named_modules()):
            wanted = [key for key in sorted(names.get(number, ())) if _matters(module, key) and (path, key) not in own]
            values.append((number, tuple((key, keeper.kept(vars(module).get(key, _ABSENT))) for key in wanted)))
            for key in wanted:
                if key not in vars(module):
                    shared[type(module), key] = keeper.kept(_of_class(type(module), key))
        return cls(_wiring(modules), tuple(values), tuple((*place, kept) for place, kept in shared.items()))

    def hold(self, modules: Sequence[nn.Module]) -> bool:
        """Whether everything is as it was; ``modules`` are all of the model's."""
        if _wiring(modules) != self.wiring:
            return False
        for number, items in self.values:
            own = modules[number].__dict__
            for name, kept in items:
                value = own.get(name, _ABSENT)
                if value is not kept and not _same(kept, value):
                    return False
        return all(_same(kept, _of_class(kind, name)) for kind, name, kept in self.shared)

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
            changed = [(key, own.get(key, _ABSENT)) for key, kept in items if not _same(kept, own.get(key, _ABSENT))]
            found += [f"{where}.{key} is {_shown(value)}" for key, value in changed]
        for kind, name, kept in self.shared:
            if not _same(kept, _of_class(kind, name)):
                found.append(f"{kind.__name__}.{name} is {_shown(_of_class(kind, name))}")
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
            () if module is root else _hooks(module.__dict__),
        )
        for module in modules
    )


def _hooks(own: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(hook for name in _HOOKS if own[name] for hook in own[name].values())


def _matters(module: nn.Module, name: str) -> bool:
    """Parameters and buffers are arguments of the program, and submodules are guarded by themselves."""
    own = vars(module)
    registered = any(name in own[registry] for registry in ("_parameters", "_buffers", "_modules"))
    return not registered and name not in OWN and name not in _WHOLE and (name in own or name not in _INHERITED)


def _of_class(kind: type, name: str) -> Any:
    """What a class or one of its bases has under the name, as it stands there."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)


@dataclass(frozen=True, slots=True)
class _Items:
    """A container, and what was in it."""

    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Array:
    copy: Any


@dataclass(frozen=True, slots=True)
class _Object:
    """An object, and its attributes."""

    value: Any
    attributes: dict[str, Any]


class _Keeper:
    """Makes what is remembered of values; every object is looked into once."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def kept(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, _CONTAINERS):
            return _Items(type(value), tuple(self.kept(item, depth) for item in _items(value)))
        if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
            return _Array(value.copy())
        if isinstance(value, (*structure.PLAIN, *_CLOSED)) or depth == _DEPTH or len(self.seen) == _MOST_OBJECTS:
            return value
        own = _fields(value)
        if not own or id(value) in self.seen:
            return value
        self.seen[id(value)] = value
        return _Object(value, {name: self.kept(item, depth + 1) for name, item in own.items()})


def _items(value: Any) -> Sequence[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included; of a bound method, its object."""
    if isinstance(value, types.MethodType):
        return {"__self__": value.__self__}
    own = getattr(value, "__dict__", None)
    found = dict(own) if type(own) is dict else {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                found[name] = object.__getattribute__(value, name)
    return found


def _same(kept: Any, value: Any) -> bool:
    if kept is value:
        return True
    if isinstance(kept, _Items):
        if type(value) is not kept.kind:
            return False
        now = _items(value)
        same = len(now) == len(kept.items)
        return same and (all(map(operator.is_, kept.items, now)) or all(map(_same, kept.items, now)))
    if isinstance(kept, _Object):
        if value is not kept.value and not _same_method(kept.value, value):
            return False
        own = _fields(value)
        return own.keys() == kept.attributes.keys() and all(
            _same(item, own[name]) for name, item in kept.attributes.items()
        )
    if isinstance(kept, _Array):
        return isinstance(value, np.ndarray) and value.dtype == kept.copy.dtype and _equal(kept.copy, value)
    if type(kept) is not type(value) or not isinstance(kept, (*structure.PLAIN, np.generic)):
        return _same_method(kept, value)
    return bool(kept == value or (kept != kept and value != value))


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
    if value is _ABSENT:
        return "absent"
    return repr(value) if isinstance(value, structure.PLAIN) else f"another {type(value).__name__}"

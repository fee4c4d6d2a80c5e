"""What a program depends on that no argument of the call shows: plain attributes, hooks and submodules of the model.

While a model is captured, the attributes that its forward pass reads are noted (``reads``). ``Guards`` keeps what they were
in the model itself, along with the class of every module and its hooks, and tells later whether all of it is still so:
numbers, strings and containers of such are compared by value, and everything else is the very same object. An object that
is no module and no tensor, such as a configuration, is looked into one level deep.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.capture import structure
from lowtide.capture.attributes import OWN, Place, named

_ABSENT = object()
_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce_ex__"})  # whoever reads these reads all attributes
_INHERITED = frozenset(vars(nn.Module)) - {"forward"} - _WHOLE
_CONTAINERS = (list, tuple, deque, set, frozenset, dict)
_CLOSED = (nn.Module, torch.Tensor, types.ModuleType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_LOCK = threading.Lock()
_WATCHED: dict[int, tuple[set[tuple[int, str]], int]] = {}  # a module's id -> the places read, its number


@contextlib.contextmanager
def reads(model: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Inside, the attributes of the modules of ``model`` that are read are added to the set: number of the module, name."""
    found: set[tuple[int, str]] = set()
    numbers = {id(module): (found, number) for number, module in enumerate(model.modules())}
    with _LOCK:
        if not _WATCHED:
            nn.Module.__getattribute__ = _noting  # type: ignore[method-assign,assignment]
        _WATCHED.update(numbers)
    try:
        yield found
    finally:
        with _LOCK:
            for key in numbers:
                del _WATCHED[key]
            if not _WATCHED:
                del nn.Module.__getattribute__


def _noting(module: nn.Module, name: str) -> Any:
    watched = _WATCHED.get(id(module))
    if watched is not None and name not in _INHERITED and not (name in _WHOLE and _asked_by_torch()):
        watched[0].add((watched[1], name))
    return super(nn.Module, module).__getattribute__(name)


def _asked_by_torch() -> bool:
    """Whether ``nn.Module`` itself looks for a parameter."""
    return sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__


@dataclass(frozen=True, slots=True)
class Guards:
    """``kinds`` and ``hooks``: of all modules below the model, in order. ``values``: of a module by its number, names of
    attributes and what they were."""

    kinds: tuple[type, ...] = ()
    hooks: tuple[tuple[Any, ...], ...] = ()
    values: tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, read: set[tuple[int, str]], but: Sequence[Place] = ()) -> Guards:
        """``read``: as ``reads`` found them; ``but``: attributes that planned calls write themselves."""
        modules = list(model.modules())
        names: dict[int, set[str]] = {}
        for number, name in read:
            names.setdefault(number, set()).update(vars(modules[number]) if name in _WHOLE else (name,))
        own = {*but, ("", "forward")}
        seen: set[int] = set()
        values = []
        for number, (path, module) in enumerate(model.named_modules()):
            wanted = [key for key in sorted(names.get(number, ())) if _matters(module, key) and (path, key) not in own]
            values.append((number, tuple((key, _kept(_attribute(module, key), seen)) for key in wanted)))
        return cls(*_outside(modules), tuple(values))

    def hold(self, modules: Sequence[nn.Module]) -> bool:
        """Whether everything is as it was; ``modules`` are all of the model's."""
        if _outside(modules) != (self.kinds, self.hooks):
            return False
        for number, items in self.values:
            module = modules[number]
            own = module.__dict__
            for name, kept in items:
                if own.get(name, _ABSENT) is not kept and not _same(kept, _attribute(module, name)):
                    return False
        return True

    def broken(self, model: nn.Module) -> str:
        """In words, what is not as it was."""
        names, modules = zip(*model.named_modules(), strict=True)
        kinds, hooks = _outside(modules)
        if len(kinds) != len(self.kinds):
            return f"{len(modules)} modules instead of {len(self.kinds) + 1}"
        found = [
            f"{name} is a {kind.__name__}" if kind is not old_kind else f"{name} has other hooks"
            for name, kind, old_kind, have, old in zip(names[1:], kinds, self.kinds, hooks, self.hooks, strict=True)
            if kind is not old_kind or have != old
        ]
        for number, items in self.values:
            now = {name: _attribute(modules[number], name) for name, _ in items}
            where = names[number] or type(model).__name__
            found += [f"{where}.{name} is {_shown(now[name])}" for name, kept in items if not _same(kept, now[name])]
        return named(found)


def _outside(modules: Sequence[nn.Module]) -> tuple[tuple[type, ...], tuple[tuple[Any, ...], ...]]:
    """Classes and hooks. Those of the model itself are around its planned forward."""
    below = modules[1:]
    return tuple(map(type, below)), tuple(map(_hooks, below))


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    return tuple(hook for name in _HOOKS if own[name] for hook in own[name].values())


def _matters(module: nn.Module, name: str) -> bool:
    """Parameters, buffers and submodules are arguments of the program, or guarded by themselves."""
    own = vars(module)
    registered = any(name in own[registry] for registry in ("_parameters", "_buffers", "_modules"))
    return not registered and name not in OWN and name not in _WHOLE


def _attribute(module: nn.Module, name: str) -> Any:
    """The module's own, or a plain value of its class: methods and properties are not asked."""
    own = vars(module)
    if name in own:
        return own[name]
    value = getattr(type(module), name, _ABSENT)
    return value if isinstance(value, structure.PLAIN) else _ABSENT


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A container of numbers, strings and such containers: a copy of it."""

    copy: Any


@dataclass(frozen=True, slots=True)
class _Items:
    """Any other container, and what was in it."""

    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Object:
    """An object, and its attributes."""

    value: Any
    attributes: dict[str, Any]


def _kept(value: Any, seen: set[int] | None) -> Any:
    """What to remember of a value. ``seen``: objects that are looked into already; none are where there is no such set."""
    if isinstance(value, _CONTAINERS):
        if _is_plain(value):
            return _Numbers(copy.deepcopy(value))
        return _Items(type(value), tuple(_kept(item, seen) for item in _items(value)))
    own = None if isinstance(value, _CLOSED) else getattr(value, "__dict__", None)
    if seen is None or type(own) is not dict or id(value) in seen:
        return value
    seen.add(id(value))
    return _Object(value, {name: _kept(item, None) for name, item in own.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, _items(value)))
    return isinstance(value, structure.PLAIN)


def _items(value: Any) -> Sequence[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _same(kept: Any, value: Any) -> bool:
    if kept is value:
        return True
    if isinstance(kept, _Numbers):
        with contextlib.suppress(RuntimeError, ValueError):  # a tensor or an array has come in
            return type(value) is type(kept.copy) and bool(value == kept.copy)
        return False
    if isinstance(kept, _Items):
        return type(value) is kept.kind and _all_same(kept.items, _items(value))
    if isinstance(kept, _Object):
        own = vars(value) if value is kept.value else {}
        return own.keys() == kept.attributes.keys() and all(
            _same(item, own[name]) for name, item in kept.attributes.items()
        )
    if type(kept) is not type(value) or not isinstance(kept, structure.PLAIN):
        return False
    return bool(kept == value or (kept != kept and value != value))


def _all_same(kept: Sequence[Any], values: Sequence[Any]) -> bool:
    return len(kept) == len(values) and all(map(_same, kept, values))


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    return repr(value) if isinstance(value, structure.PLAIN) else f"another {type(value).__name__}"

"""What code can write outside itself: the variables, containers, objects and classes that it can name."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import dis
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef

from lowtide.capture.python_state.code.code_names import codes, full_name, is_trusted, named_by, parts_of
from lowtide.capture.python_state.code.installed import is_standard
from lowtide.objects.walk import ABSENT, OWN_GENERATORS, PLAIN, cell_value, content, is_open, refill

_DEPTH = 5  # levels of containers, objects and functions in each other
# Without what fills itself.
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
CODE = (types.FunctionType, types.MethodType, functools.partial, type)
_LEAVES = frozenset({  # types that lead nowhere, which most named objects have
    *PLAIN, frozenset, types.ModuleType, types.CodeType, types.UnionType, types.GetSetDescriptorType, dataclasses.Field,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.MemberDescriptorType, type(functools.lru_cache(len)),
})  # fmt: skip
_STORES_GLOBAL, _STORES_OUTSIDE = dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]
Named = tuple[Any, str]  # a value and its name


class Holder(NamedTuple):
    """Something that a pass may write: a container, the attributes of an object or class, or a variable. ``read``
    returns a copy of its content, and ``then`` is the former content. ``live``: the object that is copied, if there
    is one. ``keyed``: whether its ``name`` continues with the key of what changed."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    then: Any
    live: Any = None
    keyed: bool = False
    of_object: bool = False

    @property
    def is_as_then(self) -> bool:
        """Whether it holds the same objects in the same order."""
        now = self.read() if self.live is None else self.live
        return len(now) == len(self.then) and (not now or all(map(operator.is_, items_of(now), items_of(self.then))))

    def added(self, now: Any) -> list[Any]:
        """What was not there before, or not under this key."""
        if isinstance(now, dict):
            return [value for key, value in now.items() if self.then.get(key, ABSENT) is not value]
        known = {*map(id, self.then)}
        return [item for item in now if id(item) not in known]

    def has_other_values(self, now: Any) -> bool:
        """Whether there are more values than before, or, in an object, other plain values. (A new object in an object
        may be a cached property.) Removed values (``batch.pop("labels")``) do not matter."""
        if not self.of_object:
            return bool(self.added(now)) or len(now) > len(self.then)
        return any(
            isinstance(value, PLAIN) and key in self.then and value != self.then[key] for key, value in now.items()
        )

    def changed(self, now: Any) -> str:
        """The name of what changed."""
        if not self.keyed:
            return self.name
        keys = {**self.then, **now}
        return f"{self.name}.{next(k for k in keys if self.then.get(k, ABSENT) is not now.get(k, ABSENT))}"


class Reach:
    """What code can write: variables, and the containers, objects and classes that it can name. ``inside``: ids of
    objects that are handled elsewhere. ``generators``: generators of numbers that it can draw from."""

    def __init__(self, inside: Iterable[int] = ()) -> None:
        self._inside = {*inside}
        self._holders: dict[Any, Holder] = {}
        self._seen: dict[int, int] = {}  # by id, the depth to which it was searched
        self._level: list[Named] = []
        self._deeper: list[Named] = []
        self.generators: list[Any] = []

    def add(self, named: Iterable[Named]) -> None:
        """Add these values, and what they (functions, say) can name."""
        self._walk(named, _DEPTH + 1)

    def as_now(self) -> Reach:
        """The same places with their present content, and with what can be written there now."""
        changed = dict(self._changed())
        if not changed:
            return self
        other = Reach(self._inside)
        other._holders = self._holders | {key: one._replace(then=one.read()) for key, one in changed.items()}
        other._seen = dict(self._seen)
        for one in changed.values():
            added = [(item, one.name) for item in one.added(one.read()) if not isinstance(item, torch.Tensor)]
            other._walk(added, self._seen.get(id(one.live), _DEPTH) - 1)
        return other

    def changed(self) -> list[str]:
        """The names of what holds something else than when it was added."""
        return [holder.changed(now) for holder, now in self._changes()]

    def put_back(self) -> None:
        for holder, _ in self._changes():
            holder.write(holder.then)

    def _changes(self) -> Iterator[tuple[Holder, Any]]:
        return ((holder, holder.read()) for _, holder in self._changed())

    def _changed(self) -> list[tuple[Any, Holder]]:
        """The holders with other objects than before, by key. Most holders are attributes of functions, which have
        none; these are skipped first."""
        holders = self._holders.items()
        filled = [(key, one) for key, one in holders if one.live is None or one.then or len(one.live)]
        return [(key, one) for key, one in filled if not one.is_as_then]

    def _walk(self, named: Iterable[Named], depth: int) -> None:
        """Visit everything within so many steps, the nearest first, so that nothing is visited twice."""
        self._deeper = [*named]
        for left in range(depth, 0, -1):
            self._level, self._deeper = self._deeper, []
            for value, name in self._level:  # grows meanwhile
                seen = type(value) in _LEAVES or self._seen.get(id(value), 0) >= left or id(value) in self._inside
                if not seen:
                    self._collect(value, left, name)

    def _collect(self, value: Any, depth: int, name: str) -> None:
        drawing = value.__self__ if isinstance(value, types.MethodType) else value
        if isinstance(value, (types.FunctionType, type)):  # the common case
            self._collect_code(value, depth, name)
        elif isinstance(drawing, OWN_GENERATORS):
            self.generators.append(drawing)
        elif isinstance(value, types.BuiltinMethodType):  # the append of a list
            self._deeper.append((value.__self__, name))
        elif isinstance(value, types.MethodType) and isinstance(value.__self__, type):  # apply, of an autograd function
            self._deeper.append((value.__self__, full_name(value.__self__)))
        elif isinstance(value, CustomOpDef):
            self._deeper.append((value._init_fn, name))
        elif isinstance(value, CODE):
            self._collect_code(value, depth, name)
        elif type(value) in _CONTAINERS:
            self._hold(value, depth, name)
        elif isinstance(value, tuple):  # immutable, unlike its items
            self._deeper += [(item, name) for item in value]
        elif isinstance(value, contextvars.ContextVar):  # used by hooks that collect results of submodules
            self._deeper += [(item, name) for item in content(value) or ()]
        elif isinstance(value, threading.local):
            self._hold(vars(value), depth, name, of_object=True)
        elif isinstance(value, threading.Thread):
            return  # it may change its own state at any time
        elif isinstance(value, (nn.Module, types.SimpleNamespace)) or (
            not is_standard(type(value).__module__) and is_open(value)
        ):
            own = getattr(value, "__dict__", None)
            if type(own) is dict:
                self._hold(own, depth, name, of_object=True)

    def _collect_code(self, value: Any, depth: int, name: str) -> None:
        self._seen[id(value)] = depth
        if is_trusted(value):
            return
        if isinstance(value, type):
            write = functools.partial(_set_attributes, value)
            self._note(id(value), name, lambda: dict(vars(value)), write, live=vars(value), keyed=True)
            for attribute, member in [*vars(value).items()]:
                if type(member) not in _LEAVES:
                    self._level += [(part, f"{name}.{attribute}") for part in parts_of(member)]
            return
        if isinstance(value, types.FunctionType):
            self._hold(value.__dict__, depth, name)
            variables, outside = _stored_by(value.__code__)
            for variable in variables:
                self._note_variable(value.__globals__, variable)
            if outside:
                for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    self._note_cell(cell, f"{full_name(value)}.{variable}")
        self._deeper += [(named, label or name) for label, named in named_by(value)]

    def _note_variable(self, variables: dict[str, Any], name: str) -> None:
        def read() -> dict[str, Any]:
            return {name: variables[name]} if name in variables else {}

        def write(value: dict[str, Any]) -> None:
            variables.pop(name, None)
            variables.update(value)

        self._note((id(variables), name), str(variables.get("__name__")), read, write, keyed=True)

    def _note_cell(self, cell: types.CellType, name: str) -> None:
        """Add a variable of the function around the code."""

        def read() -> list[Any]:
            return [cell_value(cell)]

        def write(value: list[Any]) -> None:
            cell.cell_contents = value[0]

        self._note(id(cell), name, read, write)

    def _note(self, key: Any, name: str, read: Callable[[], Any], write: Callable[[Any], None], **more: Any) -> None:
        if key not in self._holders:
            self._holders[key] = Holder(name, read, write, read(), **more)

    def _hold(self, own: Any, depth: int, name: str, of_object: bool = False) -> None:
        if id(own) not in self._holders:
            self._note(id(own), name, own.copy, functools.partial(refill, own), live=own, of_object=of_object)
        if self._seen.get(id(own), 0) < depth:
            self._seen[id(own)] = depth
            self._deeper += [(item, name) for item in items_of(own) if not isinstance(item, torch.Tensor)]


@functools.lru_cache(maxsize=1 << 14)
def _stored_by(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """The names that code, and functions inside it, use if it writes global variables; and whether it writes variables
    of enclosing functions."""
    writing = (part.co_names for part in codes(code) if _STORES_GLOBAL in part.co_code[::2])
    return frozenset(name for names in writing for name in names), _STORES_OUTSIDE in code.co_code[::2]


def _set_attributes(kind: type, wanted: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in {**now, **wanted}:
        if name not in wanted:
            delattr(kind, name)
        elif now.get(name, ABSENT) is not wanted[name]:
            setattr(kind, name, wanted[name])


def items_of(holder: Any) -> list[Any]:
    if isinstance(holder, set):  # a copy may have another order
        return sorted(holder, key=id)
    return list(holder.values() if isinstance(holder, (dict, types.MappingProxyType)) else holder)

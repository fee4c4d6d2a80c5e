"""Reads of classes and modules. These reads cannot be observed, so every attribute that the code may name is recorded."""

from __future__ import annotations

import abc
import enum
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.code.attribute_names import DESCRIBING, attribute_names
from lowtide.capture.python_state.code.code_names import BY_COMPUTED_NAME, OPERATORS, is_code
from lowtide.capture.python_state.code.installed import is_changeable, is_installed, is_library
from lowtide.capture.python_state.guards.classes_shown import is_shown
from lowtide.capture.python_state.guards.reads import Content, Reads
from lowtide.capture.trace.patches import STANDS_FOR
from lowtide.objects.places import current
from lowtide.objects.walk import ABSENT, CONTAINERS, PLAIN, parts_of

_UNREAD = frozenset({"__dict__", "__weakref__", "__doc__", "__slotnames__"})  # not recorded for classes
_MAKING = ("__new__", "__init__", "__call__")
_MOST = 1000  # a library's containers with more items are not compared
_WHETHER = {"hasattr", "dir", *BY_COMPUTED_NAME}  # may depend on whether an attribute exists


class _Registered:
    """Counts changes to the set of virtual subclasses registered with ``kind`` (``abc``). The set is looked up only if the ABC
    cache token shows that some class was registered, as imports do. Classes from modules not ``loaded`` at the capture are
    ignored: no object that the capture saw is of such a class."""

    def __init__(self, kind: abc.ABCMeta, loaded: frozenset[str]) -> None:
        self._kind, self._loaded = kind, loaded
        self._token, self._found, self._changes = abc.get_cache_token(), self._registered(kind), 0

    def __call__(self) -> int:
        token = abc.get_cache_token()
        if token != self._token:
            found = self._registered(self._kind)
            self._changes += found != self._found
            self._token, self._found = token, found
        return self._changes

    def _registered(self, kind: Any) -> set[Any]:
        """Weak references to the classes registered with ``kind``, its subclasses, and registered classes, recursively."""
        own: set[Any] = abc._get_dump(kind)[0]  # type: ignore[attr-defined]
        below = [one for one in (*type.__subclasses__(kind), *(one() for one in own)) if isinstance(one, abc.ABCMeta)]
        return {one for one in own if not self._is_later(one())}.union(*map(self._registered, below))

    def _is_later(self, kind: Any) -> bool:
        name = getattr(kind, "__module__", None)
        return name in sys.modules and name not in self._loaded


class Namespaces:
    """The classes and modules that code can reach, and all ``attributes`` that it names, of any object. ``reach`` is called for
    each object found, with the object as copy and as original, and a text that names its place."""

    def __init__(self, reads: Reads, reach: Callable[[Any, Any, str], None]) -> None:
        self.attributes, self._spelled = set[str](), set[str]()
        self._reads, self._reach = reads, reach
        self._owners: dict[int, tuple[Any, str]] = {}
        self._inheriting: dict[type, frozenset[str]] = {}  # names inherited from library classes
        self._registered: dict[type, _Registered] = {}
        self._loaded = frozenset(sys.modules)
        self._reached: set[tuple[int, str]] = set()
        self._searched: set[int] = set()  # library modules of which all functions were recorded
        self._computed = self._elsewhere = False  # see ``AttributeNames``
        self._functions: dict[int, types.FunctionType] = {}  # the user's
        self._named: tuple[int, ...] = (0, 0, 0, 0, False, False)  # the state that ``read_named`` last handled

    def read(self, function: types.FunctionType) -> None:
        """Add the attributes that a function's code names."""
        names = attribute_names(function)
        self.attributes |= names.named
        self._spelled |= names.spelled
        self._computed |= names.computed
        self._elsewhere |= names.elsewhere
        if not is_installed(function.__code__.co_filename):
            self._functions.setdefault(id(function), function)

    def named_by_user(self) -> set[str]:
        """Attributes that the user's code names, also in strings."""
        names = map(attribute_names, self._functions.values())
        return {name for one in names for name in (*one.named, *one.spelled)}

    def add(self, owner: Any, text: str) -> bool:
        """Add a class or module. Returns whether it is new."""
        new = id(owner) not in self._owners
        self._owners.setdefault(id(owner), (owner, text))
        return new

    def add_class(self, kind: type) -> None:
        """Record all attributes of a class, because Python's method look-ups cannot be observed. Of a library's class, record
        only the classes registered as its subclasses."""
        if isinstance(kind, abc.ABCMeta) and kind not in self._registered:
            registered = self._registered[kind] = _Registered(kind, self._loaded)
            self._reads.note("answer", registered, "", registered(), f"what is registered as a {kind.__qualname__}")
        if is_library(kind) or not self.add(kind, kind.__qualname__):
            return
        for name in vars(kind).keys() - _UNREAD:
            self._reads.note("class", kind, name, vars(kind)[name], f"{kind.__qualname__}.{name}")
        self._reads.note_names(kind, current("names", kind, ""), kind.__qualname__)
        self._reads.note("made of", kind, "__mro__", kind.__mro__, f"the bases of {kind.__qualname__}")
        if isinstance(kind, enum.EnumMeta):
            self._reach(kind._member_map_, kind._member_map_, f"{kind.__qualname__}.__members__")

    def add_inherited(self, kind: type) -> None:
        """Prepare to record what a class inherits from library classes: the attributes that code names, and methods that make
        or call its objects. Not for modules and tensors, which are handled elsewhere."""
        if is_changeable(kind) and not issubclass(kind, (nn.Module, torch.Tensor)):
            bases = [base for base in kind.__mro__ if is_changeable(base) and is_library(base)]
            self._inheriting.setdefault(kind, frozenset().union(*map(vars, bases)) - _UNREAD)

    def read_named(self) -> None:
        """Record the attributes that code names, of tensors and of all classes and modules that it can reach."""
        now = (
            len(self._owners),
            len(self._inheriting),
            len(self._functions),
            len(self.attributes),
            self._computed,
            self._elsewhere,
        )
        known, self._named = self._named, now
        if known == now:
            return
        self._read_descriptions()
        anywhere = dir(torch.Tensor) if self._elsewhere else ()
        for name in sorted(self.attributes.union(OPERATORS, anywhere)):
            method = current("class", torch.Tensor, name)
            if method is not ABSENT or name in self._spelled:
                self._reads.note("class", torch.Tensor, name, method, f"torch.Tensor.{name}")
        for kind, inherited in self._inheriting.items():
            for name in sorted(inherited & self.attributes.union(OPERATORS, _MAKING)):
                self._reads.note("class", kind, name, current("class", kind, name), f"{kind.__qualname__}.{name}")
        for owner, text in [*self._owners.values()]:
            library = is_library(owner)
            if isinstance(owner, types.ModuleType):  # classes are recorded already
                self._read_module(owner, text, library)
            own = vars(owner)
            for name in self._names_in(own, library):
                if (id(owner), name) not in self._reached:
                    self._reached.add((id(owner), name))
                    self._reach(own[name], own[name], f"{text}.{name}")

    def _read_module(self, owner: types.ModuleType, text: str, library: bool) -> None:
        own = vars(owner)
        there = {name: value for name, value in own.items() if not is_shown(value)}
        named = {name: there[name] for name in sorted(self.attributes & there.keys())}
        if library:
            named |= dict.fromkeys(sorted(self._spelled - there.keys()), ABSENT)  # ``getattr(sys, "debug", 0)``
        else:
            self._reads.note("type", owner, "", type(owner), f"the class of {text}")
            otherwise = own.get("__getattr__", ABSENT)  # called for missing names
            self._reads.note("item", own, "__getattr__", otherwise, f"{text}.__getattr__")
            if otherwise is not ABSENT:
                self._reach(otherwise, otherwise, f"{text}.__getattr__")
                named |= dict.fromkeys(sorted(self.attributes - there.keys()), ABSENT)
            if self.attributes & _WHETHER:
                self._reads.note_names(owner, there, text)
            if self.attributes & BY_COMPUTED_NAME:
                named = {**named, **there}
        if library and self._elsewhere and id(owner) not in self._searched:
            self._searched.add(id(owner))
            named |= {name: value for name, value in there.items() if _is_function(value)}  # ``getattr(F, self.name)``
        for name, value in named.items():
            self._reads.note("item", own, name, value, f"{text}.{name}")

    def _names_in(self, own: Mapping[str, Any], library: bool) -> list[str]:
        """The names in a class or module whose values are to be inspected."""
        if not library and self._computed:
            return [name for name in own if not isinstance(own[name], types.ModuleType) and not name.startswith("__")]
        named = sorted(self.attributes & own.keys())
        if library:  # its other objects are only compared by identity
            named = [name for name in named if _is_told(own[name])]
        if library and self._elsewhere:
            named += [name for name, value in own.items() if _is_function(value) and not is_library(value)]
        return named

    def _read_descriptions(self) -> None:
        """Record the descriptive attributes (``__name__``, ``__doc__`` ...) and subclasses that code asks for."""
        kinds = [(owner, text) for owner, text in self._owners.values() if isinstance(owner, type)]
        for name in sorted(self.attributes & DESCRIBING):
            for function in self._functions.values():
                value = getattr(function, name)
                self._reads.note("made of", function, name, value, f"{function.__qualname__}.{name}")
                self._reach(value, value, f"{function.__qualname__}.{name}")
            for kind, text in kinds:
                found = "class" if name in vars(kind) else "made of"
                if found == "class" or name in ("__name__", "__qualname__"):
                    self._reads.note(found, kind, name, current(found, kind, name), f"{text}.{name}")
        for kind, text in kinds if "__subclasses__" in self.attributes else ():
            below = current("subclasses", kind, "")
            self._reads.contents[id(below)] = Content(below, below)
            self._reads.note("subclasses", kind, "", below, f"the subclasses of {text}")
            for one in below:
                self._reach(one, one, "")


def _is_function(value: Any) -> bool:
    """Whether ``value`` is a function or class, or a tracer's replacement for one."""
    return STANDS_FOR in getattr(value, "__dict__", ()) or (is_code(value) and not isinstance(value, types.ModuleType))


def _is_told(value: Any) -> bool:
    """Whether a library's object is worth inspecting: a plain value, code, a logger, or a small container of plain values and
    code."""
    if not isinstance(value, CONTAINERS):
        return is_code(value) or isinstance(value, (*PLAIN, logging.Logger))
    parts = parts_of(value) if len(value) <= _MOST else [None]
    return all(isinstance(one, CONTAINERS) or _is_function(one) for one in parts)

"""What code reads of classes and of modules: no read of theirs is seen, so what it may name there is noted."""

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

_UNREAD = frozenset({"__dict__", "__weakref__", "__doc__", "__slotnames__"})  # of what stands in a class
_MAKING = ("__new__", "__init__", "__call__")
_MOST = 1000  # items of a library's container that are compared
_WHETHER = {"hasattr", "dir", *BY_COMPUTED_NAME}  # ask for attributes that may not be there


class _Registered:
    """How often it has changed which classes are registered as subclasses of ``kind``: looked up where any class was registered
    with any other since, as imports do. No object that a capture saw is of a class from a module that was not ``loaded``."""

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
        """Weak references to what is registered with the class, with one that inherits from it, or with one of these."""
        own: set[Any] = abc._get_dump(kind)[0]  # type: ignore[attr-defined]
        below = [one for one in (*type.__subclasses__(kind), *(one() for one in own)) if isinstance(one, abc.ABCMeta)]
        return {one for one in own if not self._is_later(one())}.union(*map(self._registered, below))

    def _is_later(self, kind: Any) -> bool:
        name = getattr(kind, "__module__", None)
        return name in sys.modules and name not in self._loaded


class Namespaces:
    """Classes and modules that code can reach, and the ``attributes`` that it names, of anything. ``reach`` is called with
    what is found there, twice, and where."""

    def __init__(self, reads: Reads, reach: Callable[[Any, Any, str], None]) -> None:
        self.attributes, self._spelled = set[str](), set[str]()
        self._reads, self._reach = reads, reach
        self._owners: dict[int, tuple[Any, str]] = {}
        self._inheriting: dict[type, frozenset[str]] = {}  # what they have of libraries' classes
        self._registered: dict[type, _Registered] = {}
        self._loaded = frozenset(sys.modules)
        self._reached: set[tuple[int, str]] = set()
        self._searched: set[int] = set()  # modules of libraries that code may ask for any function of theirs
        self._computed = self._elsewhere = False  # see ``AttributeNames``
        self._functions: dict[int, types.FunctionType] = {}  # of the user's
        self._named: tuple[int, ...] = (0, 0, 0, 0, False, False)  # how many of these were looked at

    def read(self, function: types.FunctionType) -> None:
        """Add the attributes that code of the user's names."""
        names = attribute_names(function)
        self.attributes |= names.named
        self._spelled |= names.spelled
        self._computed |= names.computed
        self._elsewhere |= names.elsewhere
        if not is_installed(function.__code__.co_filename):
            self._functions.setdefault(id(function), function)

    def named_by_user(self) -> set[str]:
        """Attributes that code of the user's names, also in texts."""
        names = map(attribute_names, self._functions.values())
        return {name for one in names for name in (*one.named, *one.spelled)}

    def add(self, owner: Any, text: str) -> bool:
        """Whether it is a new one."""
        new = id(owner) not in self._owners
        self._owners.setdefault(id(owner), (owner, text))
        return new

    def add_class(self, kind: type) -> None:
        """All that stands in a class is noted: Python looks methods up there where nobody sees it. Of a library's, what is
        registered as its subclass."""
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
        """Of what classes of libraries give to it, that is noted which code names, and what makes its objects. Modules' methods
        and tensors' are read otherwise."""
        if is_changeable(kind) and not issubclass(kind, (nn.Module, torch.Tensor)):
            bases = [base for base in kind.__mro__ if is_changeable(base) and is_library(base)]
            self._inheriting.setdefault(kind, frozenset().union(*map(vars, bases)) - _UNREAD)

    def read_named(self) -> None:
        """Of tensors, and of classes and modules that code can reach, the attributes that it names."""
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
            if isinstance(owner, types.ModuleType):  # of a class, all is noted already
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
            otherwise = own.get("__getattr__", ABSENT)  # what is asked for names that are not there
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
        """Under which names there is something in a class or a module to look at."""
        if not library and self._computed:
            return [name for name in own if not isinstance(own[name], types.ModuleType) and not name.startswith("__")]
        named = sorted(self.attributes & own.keys())
        if library:  # of its other objects, which ones they are
            named = [name for name in named if _is_told(own[name])]
        if library and self._elsewhere:
            named += [name for name, value in own.items() if _is_function(value) and not is_library(value)]
        return named

    def _read_descriptions(self) -> None:
        """Of functions and classes, the names, texts and subclasses that code asks for."""
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
    """Whether it is a function or a class, or stands for one while a model is traced."""
    return STANDS_FOR in getattr(value, "__dict__", ()) or (is_code(value) and not isinstance(value, types.ModuleType))


def _is_told(value: Any) -> bool:
    """Whether what code does with an object of a library is told by looking at it: a number, code, or some of these."""
    if not isinstance(value, CONTAINERS):
        return is_code(value) or isinstance(value, (*PLAIN, logging.Logger))
    parts = parts_of(value) if len(value) <= _MOST else [None]
    return all(isinstance(one, CONTAINERS) or _is_function(one) for one in parts)

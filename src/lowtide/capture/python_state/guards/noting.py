"""Classes that note what is read of their objects, and what is written to them, for a time."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowtide.objects.walk import ABSENT, class_attribute

Note = Callable[[Any, str], None]
SAVING = frozenset({"_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"})  # of a module
_TELLING = ("state_dict", "_save_to_state_dict", "__dir__")  # methods of modules whose results are what they read
_LIBRARIES = (nn.Module.__module__, "functools")
_METHODS = ("__getattribute__", "__setattr__", "__delattr__")


class NotingClasses:
    """While somebody listens, every read and write of an attribute is noted, of objects of a class that was added."""

    def __init__(self) -> None:
        self._notes: dict[str, Note] = {}
        self._before: dict[type, dict[str, Any]] = {}  # what the classes had instead
        self._added: dict[type, None] = {}  # at any time

    @contextlib.contextmanager
    def noted(self, read: Note, write: Note) -> Iterator[None]:
        """Inside, both are called with the object and the name of its attribute."""
        self._notes.update(zip(_METHODS, (read, write, write), strict=True))
        try:
            yield
        finally:
            self._notes.clear()

    def add(self, kind: type) -> bool:
        """Whether all reads of objects of the class are noted from now on; a method in Python may read where nobody sees it."""
        get: Any = kind.__getattribute__
        original = getattr(get, "_original", get)
        if original is get:  # else a base notes already
            methods = {name: _noting(self._notes, name, getattr(kind, name)) for name in _METHODS}
            before = {name: vars(kind).get(name, ABSENT) for name in methods}
            try:
                _put(kind, methods)
            except (TypeError, AttributeError, RuntimeError):  # a class made elsewhere, or whose class forbids it
                return False
            self._before[kind] = before
            self._added[kind] = None
        return not any(isinstance(one, types.FunctionType) for one in (original, class_attribute(kind, "__getattr__")))

    def add_again(self) -> None:
        for kind in self._added:
            self.add(kind)

    def remove(self) -> None:
        for kind, methods in reversed(self._before.items()):
            _put(kind, methods)
        self._before.clear()


def _put(kind: type, methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        delattr(kind, name) if method is ABSENT else setattr(kind, name, method)


def _noting(notes: dict[str, Note], operation: str, method: Any) -> Any:
    def noted(self: Any, name: str, *value: Any) -> Any:
        note = notes.get(operation)
        if note is not None:
            note(self, name)
        return method(self, name, *value)

    noted._original = method  # type: ignore[attr-defined]
    return noted


def is_for_own_ends(reader: types.FrameType) -> bool:
    """Whether a library reads all attributes of an object to find one, or what of a module is saved to register a buffer: code
    that calls it does not learn of others."""
    return reader.f_globals.get("__name__") in _LIBRARIES and reader.f_code.co_name not in _TELLING

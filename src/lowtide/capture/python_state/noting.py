"""Classes that note what is read of their objects, and what is written to them, for a time."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from lowtide.program.objects import ABSENT, class_attribute

Note = Callable[[Any, str], None]


class NotingClasses:
    """``read`` and ``write`` are called with every object of a class that is added, and the name of its attribute."""

    def __init__(self, read: Note, write: Note) -> None:
        self._methods = {"__getattribute__": read, "__setattr__": write, "__delattr__": write}
        self._before: dict[type, dict[str, Any]] = {}  # what the classes had instead
        self._added: dict[type, None] = {}  # at any time

    def add(self, kind: type) -> bool:
        """Whether all reads of objects of the class are noted from now on; a method in Python may read where nobody sees it."""
        get: Any = kind.__getattribute__
        original = getattr(get, "_original", get)
        if original is get:  # else a base notes already
            methods = {name: _noting(note, getattr(kind, name)) for name, note in self._methods.items()}
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
        """Leave the classes as they were."""
        for kind, methods in reversed(self._before.items()):
            _put(kind, methods)
        self._before.clear()


def _put(kind: type, methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        delattr(kind, name) if method is ABSENT else setattr(kind, name, method)


def _noting(note: Note, method: Any) -> Any:
    def noted(self: Any, name: str, *value: Any) -> Any:
        note(self, name)
        return method(self, name, *value)

    noted._original = method  # type: ignore[attr-defined]
    return noted

"""Temporarily instrument classes to record attribute reads and writes of their objects."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowtide.objects.walk import ABSENT, class_attribute

Note = Callable[[Any, str], None]
SAVING = frozenset({"_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"})  # of a module
_TELLING = ("state_dict", "_save_to_state_dict", "__dir__")  # methods of modules that return the attributes they read
_LIBRARIES = (nn.Module.__module__, "functools")
_METHODS = ("__getattribute__", "__setattr__", "__delattr__")


class NotingClasses:
    """A set of instrumented classes. Inside ``noted``, every attribute read and write of their objects is reported."""

    def __init__(self) -> None:
        self._notes: dict[str, Note] = {}
        self._before: dict[type, dict[str, Any]] = {}  # the classes' own methods, to restore
        self._added: dict[type, None] = {}  # all classes ever added

    @contextlib.contextmanager
    def noted(self, read: Note, write: Note) -> Iterator[None]:
        """Inside the context, call ``read`` or ``write`` with the object and the attribute's name at each access."""
        self._notes.update(zip(_METHODS, (read, write, write), strict=True))
        try:
            yield
        finally:
            self._notes.clear()

    def add(self, kind: type) -> bool:
        """Instrument a class. Returns whether all reads of its objects are seen from now on: not if it cannot be changed, or
        has its own ``__getattribute__`` or ``__getattr__`` in Python, which may read unseen."""
        get: Any = kind.__getattribute__
        original = getattr(get, "_original", get)
        if original is get:  # else a base is instrumented already
            methods = {name: _noting(self._notes, name, getattr(kind, name)) for name in _METHODS}
            before = {name: vars(kind).get(name, ABSENT) for name in methods}
            try:
                _put(kind, methods)
            except (TypeError, AttributeError, RuntimeError):  # a class defined in C, or protected by its metaclass
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
    """Whether the reading code is in ``torch.nn`` or ``functools`` and reads for itself, to find one attribute or to register a
    buffer: its caller learns nothing about the other attributes."""
    return reader.f_globals.get("__name__") in _LIBRARIES and reader.f_code.co_name not in _TELLING

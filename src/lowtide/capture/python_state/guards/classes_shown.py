"""Make ``type``, ``__class__``, ``id`` and ``hash`` answer for the originals of copies and traced tensors during a trace."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lowtide.capture.python_state.code.code_names import asks_for_types, functions_of, names_in, reads_classes
from lowtide.capture.trace.classes import TRACED, Type, attribute_of
from lowtide.capture.trace.patches import STANDS_FOR, by_thread

_ASKED = (id, hash)  # for a copy, they return the answer for its original
_OWN = ("torch", "lowtide")


def is_shown(value: Any) -> bool:
    """Whether ``value`` is one of this module's temporary replacements in the user's variables."""
    return value is Type or (type(value) is types.FunctionType and vars(value).get(STANDS_FOR) in _ASKED)


class ClassesShown:
    """A context in which functions that were ``met`` (before or inside) see the replaced ``type``, ``id`` and so on in their
    modules' variables. Reentrant and shared: a replacement ends when its last user leaves."""

    _shown = Counter[tuple[int, str]]()  # number of users of each replacement, by the owner's id and the name

    def __init__(self) -> None:
        self._originals: dict[int, Any] = {}  # by the copies' ids
        self._asked = {one.__name__: by_thread(functools.partial(self._of_original, one), one) for one in _ASKED}
        self._changed: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # owner, name and replacement
        self._entered = 0

    def copied(self, originals: Mapping[int, Any]) -> None:
        """Set the originals, by the ids of their copies, for the next run."""
        self._originals.clear()
        self._originals.update(originals)

    def _of_original(self, function: Callable[[Any], int], value: Any) -> int:
        return function(self._originals.get(id(value), value))

    def met(self, function: Any) -> None:
        """The run may call this function: replace what it uses to ask for classes and identities."""
        if not isinstance(function, types.FunctionType):
            return
        variables, code = function.__globals__, function.__code__
        own = str(variables.get("__name__")).partition(".")[0] in _OWN
        if own:
            return
        if asks_for_types(code) and variables.get("type", Type) is Type:
            self._change(variables, "type", Type)
        for name in self._asked.keys() & names_in(code).variables:
            if is_shown(variables.get(name, Type)):
                self._change(variables, name, self._asked[name])
        for kind in TRACED if reads_classes(code) else ():
            self._change(kind, "__getattribute__", attribute_of)

    def met_library(self, kinds: Iterable[Any]) -> None:
        """The run may call the functions that these module classes of an installed library define (not further callees)."""
        for kind in kinds:
            for function in (kind.forward, *functions_of(kind)):
                self.met(function)

    def _change(self, owner: Any, name: str, value: Any) -> None:
        if (id(owner), name) not in self._changed:
            self._changed[id(owner), name] = owner, name, value
            for _ in range(self._entered):
                self._show(owner, name, value)

    def _show(self, owner: Any, name: str, value: Any) -> None:
        self._shown[id(owner), name] += 1
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)

    def _hide(self, owner: Any, name: str) -> None:
        self._shown[id(owner), name] -= 1
        if self._shown[id(owner), name]:
            return
        del self._shown[id(owner), name]
        if isinstance(owner, dict):
            del owner[name]
        else:
            delattr(owner, name)

    def __enter__(self) -> None:
        self._entered += 1
        for owner, name, value in self._changed.values():
            self._show(owner, name, value)

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        for owner, name, _value in self._changed.values():
            self._hide(owner, name)

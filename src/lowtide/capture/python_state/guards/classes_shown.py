"""Where ``type(x)`` and ``x.__class__`` say what they would of the tensors that traced ones stand for."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lowtide.capture.python_state.code.code_names import asks_for_types, functions_of, reads_classes
from lowtide.capture.trace.classes import TRACED, Type, attribute_of

_NAME = "type"
_OWN = ("torch", "lowtide")


class ClassesShown:
    """Inside, the code of modules is told these classes: of those whose functions were met, before or meanwhile.
    What is entered more than once, or of several calls, ends where it is left the last time."""

    _shown = Counter[int]()  # for how many, by the id of what is changed for them

    def __init__(self) -> None:
        self._changed: dict[int, tuple[Any, str, Any]] = {}  # variables or a class, and what is what there
        self._entered = 0

    def met(self, function: Any) -> None:
        """The run may call it."""
        if not isinstance(function, types.FunctionType):
            return
        variables, code = function.__globals__, function.__code__
        own = str(variables.get("__name__")).partition(".")[0] in _OWN
        if asks_for_types(code) and variables.get(_NAME, Type) is Type and not own:
            self._change(variables, _NAME, Type)
        for kind in TRACED if reads_classes(code) else ():
            self._change(kind, "__getattribute__", attribute_of)

    def met_library(self, kinds: Iterable[Any]) -> None:
        """The run may call what these classes of an installed library define, of whose functions no more is asked."""
        for kind in kinds:
            for function in (kind.forward, *functions_of(kind)):
                self.met(function)

    def _change(self, owner: Any, name: str, value: Any) -> None:
        if id(owner) not in self._changed:
            self._changed[id(owner)] = owner, name, value
            for _ in range(self._entered):
                self._show(owner, name, value)

    def _show(self, owner: Any, name: str, value: Any) -> None:
        self._shown[id(owner)] += 1
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)

    def _hide(self, owner: Any, name: str) -> None:
        self._shown[id(owner)] -= 1
        if self._shown[id(owner)]:
            return
        del self._shown[id(owner)]
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

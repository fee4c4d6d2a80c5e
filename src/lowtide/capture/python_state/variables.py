"""Variables outside of the model that its code reads: global ones, those of functions around it, attributes of objects there.

A planned call does not run that code, so a program is good for calls that find these variables as they were when it was
captured (``capture.guards``). What the code reads is told from the code itself, not from what it does: every variable that it
names in any branch; of an object there, its class or a module, the attributes that the code names somewhere. Libraries that are
installed are taken to be constant, and caches of tensors and long containers are not looked at.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.capture.python_state.codes import (
    cells_of,
    defaults_of,
    full_name,
    is_installed,
    is_standard,
    names_in,
    parts_of,
)
from lowtide.capture.python_state.paths import ABSENT, MOST_OBJECTS
from lowtide.program import structure

_DEPTH = 6  # of functions in functions, and of objects in objects
_MOST_ITEMS = 256  # of a container that is compared
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class Variable(NamedTuple):
    """``owner``: what has it under the name, a cell or a namespace, or an object, class or module with one."""

    owner: Any
    name: str
    text: str

    def value(self) -> Any:
        if isinstance(self.owner, types.CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                return ABSENT
        names = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return names.get(self.name, ABSENT)


def variables_of(model: nn.Module) -> list[Variable]:
    """Those that code of the model, or of hooks of its submodules, names; each once."""
    found = _Found()
    for module in model.modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] if module is not model else []
        for value in (*vars(module).values(), *hooks):
            if isinstance(value, _FUNCTIONS):
                found.reach(value, _DEPTH)
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        found.reach(kind, _DEPTH)
    return list(found.variables())


class _Found:
    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        self.attributes: set[str] = set()  # that the code reads, of anything
        self.first: list[tuple[Variable, Any]] = []

    def reach(self, value: Any, depth: int) -> None:
        """Look at the code of a function or a class, and of those that it names."""
        if depth == 0 or id(value) in self.seen:
            return
        if isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self.reach(item, depth - 1)
        elif isinstance(value, types.MethodType):
            self.reach(value.__func__, depth)
        elif isinstance(value, type) and not _is_library(value):
            self.seen[id(value)] = value
            for member in [*vars(value).values()]:
                for part in parts_of(member):
                    if isinstance(part, _FUNCTIONS):
                        self.reach(part, depth)
        elif isinstance(value, types.FunctionType) and not is_installed(value.__code__.co_filename):
            self.seen[id(value)] = value
            self._look_at(value, depth)

    def _look_at(self, function: types.FunctionType, depth: int) -> None:
        names = names_in(function.__code__)
        self.attributes |= names.attributes
        variables, where = function.__globals__, full_name(function)
        named = [
            Variable(cell, name, f"{name} in {where}") for name, cell, _ in cells_of(function) if name != "__class__"
        ]
        for name in sorted(names.variables & variables.keys()):
            named.append(Variable(variables, name, f"{variables.get('__name__')}.{name}"))
        for variable in named:
            value = variable.value()
            self.first.append((variable, value))
            self.reach(value, depth - 1)
            if _has_fields(value) and not isinstance(value, type):
                self.reach(type(value), depth - 1)
            if isinstance(value, types.ModuleType) and not _is_library(value):
                for name in sorted(names.attributes & vars(value).keys()):
                    self.reach(vars(value)[name], depth - 1)
        for value in defaults_of(function):
            self.reach(value, depth - 1)

    def variables(self) -> Iterator[Variable]:
        seen: dict[tuple[int, str], Any] = {}
        waiting = [(variable, value, _DEPTH) for variable, value in self.first]
        while waiting and len(seen) < MOST_OBJECTS:
            variable, value, depth = waiting.pop()
            key = id(variable.owner), variable.name
            if key in seen:
                continue
            seen[key] = variable
            if _is_watched(value):
                yield variable
            for owner in _owners(value) if depth else ():
                names = sorted(self.attributes & vars(owner).keys())
                waiting += [(Variable(owner, n, f"{variable.text}.{n}"), vars(owner)[n], depth - 1) for n in names]


def _is_watched(value: Any) -> bool:
    if isinstance(value, structure.CONTAINERS):  # not a cache of tensors, nor a long history
        return _size(value) <= _MOST_ITEMS and not structure.flatten(value)[0]
    return not isinstance(value, (types.ModuleType, nn.Module))


def _size(container: Any) -> int:
    """How much is in it and in containers inside it, as far as that is not too much."""
    size, waiting = 0, [container]
    while waiting and size <= _MOST_ITEMS:
        found = waiting.pop()
        size += len(found)
        if size <= _MOST_ITEMS:
            waiting += [item for item in structure.items(found) if isinstance(item, structure.CONTAINERS)]
    return size


def _has_fields(value: Any) -> bool:
    """Whether it is an object, or a module or a class of the user's."""
    if isinstance(value, (*structure.PLAIN, *structure.CONTAINERS, *_FUNCTIONS, torch.Tensor, nn.Module)):
        return False
    own = getattr(value, "__dict__", None)
    if not isinstance(own, (dict, types.MappingProxyType)):
        return False
    return not (isinstance(value, (type, types.ModuleType)) and _is_library(value))


def _owners(value: Any) -> list[Any]:
    """What has attributes of it: itself, and its classes."""
    if not _has_fields(value) or isinstance(value, types.ModuleType):
        return [value] if _has_fields(value) else []
    classes = (value if isinstance(value, type) else type(value)).__mro__
    return [*([] if isinstance(value, type) else [value]), *(kind for kind in classes if not _is_library(kind))]


def _is_library(value: Any) -> bool:
    """Whether a module or a class is of an installed library."""
    name = str(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None)
    return is_standard(name) if file is None else is_installed(file)

"""What the user's functions and classes name outside of themselves: global variables, those of functions around them, defaults.

No attribute read shows these, so they are told from the code: every variable that it names in any branch; of a class or a
module there, the attributes that code names anywhere. Libraries that are installed are taken to be constant.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from lowtide.capture.python_state.code_names import full_name, is_installed, is_standard, names_in, parts_of

_ENVIRONMENT = {"environ", "getenv"}


class Named(NamedTuple):
    """A variable by its ``owner``, a namespace, cell or function that has it under the ``name``; ``text`` for messages."""

    kind: str
    owner: Any
    name: str
    text: str


def variables_of(function: types.FunctionType) -> Iterator[Named]:
    """The variables that a function reads when it runs, and its defaults. Of an installed one, only what it closes over."""
    where = full_name(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield Named("cell", cell, name, f"{name} in {where}")
    if is_installed(function.__code__.co_filename):
        return
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        yield Named("function", function, name, f"{where}.{name}")
    variables = function.__globals__
    names = names_in(function.__code__)
    for name in sorted(names.variables & variables.keys()):
        yield Named("item", variables, name, f"{variables.get('__name__')}.{name}")
    if names.attributes & _ENVIRONMENT or names.variables & _ENVIRONMENT:
        yield Named("item", vars(os.environ), "_data", "os.environ")


def attributes_named(function: types.FunctionType) -> frozenset[str]:
    """The attributes, of anything, that the code of a function of the user's names."""
    return frozenset() if is_installed(function.__code__.co_filename) else names_in(function.__code__).attributes


def functions_of(kind: type) -> Iterator[Any]:
    """What there is to run in a class and its bases, those of libraries excepted."""
    for base in kind.__mro__:
        if not is_library(base):
            for member in [*vars(base).values()]:
                for part in (*parts_of(member), getattr(member, "func", None)):
                    if isinstance(part, (types.FunctionType, functools.partial)):
                        yield part


def is_library(value: Any) -> bool:
    """Whether a module or a class is of an installed library."""
    name = str(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", ""))
    file = getattr(sys.modules.get(name), "__file__", None)
    return is_standard(name) if file is None else is_installed(file)

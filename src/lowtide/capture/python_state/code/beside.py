"""What is defined beside a model's classes, in their modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lowtide.capture.python_state.code.code_names import functions_of, is_trusted

Variable = tuple[Any, str, Any]  # owner, name, and value
Code = tuple[set[type], list[Variable]]  # see ``code_of``


def code_of(model: nn.Module) -> Code:
    """The classes of the model's modules, and everything beside them in the modules that define them."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not is_trusted(kind)}
    files: list[Any] = [file for file in map(sys.modules.get, sorted({kind.__module__ for kind in kinds})) if file]
    known = {id(vars(file)) for file in files}
    for kind in kinds:
        for function in functions_of(kind):
            variables = getattr(function, "__globals__", {})
            if variables.get("__name__") == kind.__module__ and id(variables) not in known:
                known.add(id(variables))
                files.append(_Namespace(variables))
    return kinds, [(file, name, value) for file in files for name, value in [*vars(file).items()]]


class _Namespace:
    """Variables of code whose namespace is no module's: in a process that ``multiprocessing`` spawns, the main module
    has copies of what the script defined."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.__dict__ = variables


def places_of(functions: Iterable[tuple[Any, Sequence[str]]], beside: Iterable[Variable]) -> list[tuple[Any, str]]:
    """Where the functions are found: in their modules, and in variables that they were imported into."""
    own = [(module, name) for module, names in functions for name in names]
    known = {id(getattr(*place)) for place in own}
    return own + [(file, name) for file, name, value in beside if id(value) in known and (file, name) not in own]

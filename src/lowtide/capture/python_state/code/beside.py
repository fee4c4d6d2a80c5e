"""What stands beside the classes of a model, in the modules that define them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lowtide.capture.python_state.code.code_names import is_trusted

Variable = tuple[types.ModuleType, str, Any]
Code = tuple[set[type], list[Variable]]  # see ``code_of``


def code_of(model: nn.Module) -> Code:
    """The classes of the model's modules, and all that is beside them, in the modules that define them."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not is_trusted(kind)}
    files = filter(None, map(sys.modules.get, sorted({kind.__module__ for kind in kinds})))
    return kinds, [(file, name, value) for file in files for name, value in [*vars(file).items()]]


def places_of(functions: Iterable[tuple[Any, Sequence[str]]], beside: Iterable[Variable]) -> list[tuple[Any, str]]:
    """Where the functions are: in their modules, and in the variables that they were imported into."""
    own = [(module, name) for module, names in functions for name in names]
    known = {id(getattr(*place)) for place in own}
    return own + [(file, name) for file, name, value in beside if id(value) in known and (file, name) not in own]

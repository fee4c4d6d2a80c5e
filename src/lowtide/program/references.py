"""Maps over arguments of calls, in which references stand for tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowtide.program.program import Ref


def map_references(argument: Any, function: Callable[[Ref], Any]) -> Any:
    """Replace every ``Ref`` in ``argument`` by ``function(ref)``, also in lists, tuples and dictionaries."""
    return map_leaves(argument, Ref, function)


def map_leaves(argument: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Replace every leaf of type ``kind`` in ``argument`` by ``function(leaf)``.

    Not a nested function, which would refer to itself and keep tensors until garbage is collected.
    """
    if isinstance(argument, kind):
        return function(argument)
    if (
        isinstance(argument, (list, tuple))
        and not isinstance(argument, torch.Size)
        and not hasattr(argument, "_fields")
    ):
        return type(argument)([map_leaves(item, kind, function) for item in argument])
    if isinstance(argument, Mapping):
        return {key: map_leaves(item, kind, function) for key, item in argument.items()}
    return argument

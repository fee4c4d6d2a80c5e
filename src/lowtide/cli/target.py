"""What a command is about: the callable that a user names, and the sample of a model that it returns."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from lowtide.errors import LowtideError, PlanError

_EXAMPLE = 'for instance "mypackage.models:build", where build() returns (model, args, kwargs)'


def sample(target: str, *given: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the user's callable, with what it is ``given`` if it takes that; the current folder is importable. Raises
    ``PlanError`` for anything but a sample."""
    from torch import nn

    result = call(target, *given)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        returned = type(result).__name__
        if isinstance(result, tuple):
            returned = f"({', '.join(type(item).__name__ for item in result)})"
        raise PlanError(f"{target} returned {returned}, not a tuple (model, args, kwargs); {_EXAMPLE}.")
    model, args, kwargs = result if len(result) == 3 else (*result, {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise PlanError(f"{target} returned args and kwargs of types {kinds}; they are a tuple and a dict.")
    return model, tuple(args), kwargs


def call(target: str, *given: Any) -> Any:
    """What the user's callable returns. Raises ``PlanError`` where it cannot be found or fails."""
    try:
        function = find_callable(target)
        takes = len(inspect.signature(function).parameters) >= len(given)
        return function(*given) if takes else function()
    except LowtideError:
        raise
    except Exception as error:
        raise PlanError(f"{target} raised {type(error).__name__}: {error}.") from error


def find_callable(target: str) -> Callable[[], Any]:
    """The callable that ``PACKAGE.MODULE:CALLABLE`` or ``FILE.py:CALLABLE`` names."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise PlanError(f"{target!r} does not name a callable; write PACKAGE.MODULE:CALLABLE, {_EXAMPLE}.")
    folder = os.getcwd()
    if module_name.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(module_name))
        module_name = file.removesuffix(".py")
        if not os.path.isfile(os.path.join(folder, file)):
            raise PlanError(f"cannot load {target}: there is no file {os.path.join(folder, file)}.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = pkgutil.resolve_name(f"{module_name}:{path}")
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"cannot load {target}: {error}; {_EXAMPLE}.") from error
    if not callable(found):
        raise PlanError(f"{target} is a {type(found).__name__}, not a callable; {_EXAMPLE}.")
    result: Callable[[], Any] = found
    return result

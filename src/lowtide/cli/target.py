"""Find the callable that a user names, and the sample of a model that it returns."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lowtide.errors import LowtideError, PlanError

STAGE = "stage"  # argument for the number of a pipeline's stage
_EXAMPLE = 'for instance "mypackage.models:build", where build() returns (model, args, kwargs)'


def sample(target: str, mesh: Any = None, **numbers: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The sample that the user's callable returns, with the current folder importable. Raises ``PlanError`` for
    anything else."""
    from torch import nn

    result = call(target, mesh, **numbers)
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


def call(target: str, mesh: Any = None, **numbers: int) -> Any:
    """The result of the user's callable for these ``numbers``, and for the ``mesh`` if it takes one. Raises
    ``PlanError`` if it cannot be found, does not take such a number, or fails."""
    try:
        function = find_callable(target)
        return function(**_arguments(target, function, mesh, numbers))
    except LowtideError:
        raise
    except Exception as error:
        said = ", ".join(f"{name}={number}" for name, number in numbers.items())
        raise PlanError(f"{target}{said and f'({said})'} raised {type(error).__name__}: {error}.") from error


def _arguments(target: str, function: Callable[..., Any], mesh: Any, numbers: Mapping[str, int]) -> dict[str, Any]:
    """The ``numbers``, and the ``mesh`` as the argument of that name or as the first argument without a default."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    missing = next((name for name in numbers if all(one.name != name for one in named)), None)
    if missing is not None and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        raise PlanError(f"{target} has no argument {missing!r}; let it take one, such as def build({missing}=1).")
    free = [one for one in named if one.name not in numbers and one.name != STAGE]
    takes = [one for one in free if one.name == "mesh"] or [one for one in free if one.default is one.empty]
    return {**({takes[0].name: mesh} if mesh is not None and takes else {}), **numbers}


def find_callable(target: str) -> Callable[..., Any]:
    """The callable named by ``PACKAGE.MODULE:CALLABLE`` or ``FILE.py:CALLABLE``."""
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
    result: Callable[..., Any] = found
    return result

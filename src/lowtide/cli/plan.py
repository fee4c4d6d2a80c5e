"""``lowtide plan PACKAGE.MODULE:CALLABLE``: capture a model, measure its operators, and plan. The model is not changed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lowtide.cli.options import Subparsers, add_planning_options
from lowtide.cli.progress import progress_bar
from lowtide.errors import LowtideError, PlanError

_EXAMPLE = 'for instance "mypackage.models:build", where build() returns (model, args, kwargs)'


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("plan", help="plan the training pass of a model", description=__doc__)
    parser.add_argument("target", metavar="PACKAGE.MODULE:CALLABLE", help="returns model, args, kwargs")
    add_planning_options(parser)
    parser.add_argument("-o", "--output", metavar="plan.json", help="save the plan")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    model, args, kwargs = sample(options.target)
    import lowtide

    with progress_bar() as on_progress:
        plan = lowtide.plan(
            model,
            args,
            kwargs,
            budget=options.budget,
            planner=options.planner,
            seed=options.seed,
            on_progress=on_progress,
        )
    if options.output:
        plan.save(options.output)
        print(f"plan written to {options.output}", file=sys.stderr)
    print(plan)
    return 0


def sample(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the user's callable; the current folder is importable. Raises ``PlanError`` for anything but a sample."""
    from torch import nn

    try:
        result = find_callable(target)()
    except LowtideError:
        raise
    except Exception as error:
        raise PlanError(f"{target} raised {type(error).__name__}: {error}.") from error
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], nn.Module):
        raise PlanError(f"{target} returned {type(result).__name__}, not a tuple (model, args, kwargs); {_EXAMPLE}.")
    model, args, kwargs = result
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise PlanError(f"{target} returned args and kwargs of types {kinds}; they are a tuple and a dict.")
    return model, tuple(args), kwargs


def find_callable(target: str) -> Callable[[], Any]:
    """The callable that ``PACKAGE.MODULE:CALLABLE`` names."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise PlanError(f"{target!r} does not name a callable; write PACKAGE.MODULE:CALLABLE, {_EXAMPLE}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"cannot load {target}: {error}; {_EXAMPLE}.") from error
    if not callable(found):
        raise PlanError(f"{target} is a {type(found).__name__}, not a callable; {_EXAMPLE}.")
    result: Callable[[], Any] = found
    return result

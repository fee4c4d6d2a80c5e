"""The backend that ``torch.compile`` calls, once per graph that Dynamo makes.

Dynamo guards and breaks the program; each of its graphs is captured, planned and run as a model is, when it is first called
with real tensors, and anew for other shapes. The graphs of one ``torch.compile`` share one budget, see
``backend.shared``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.backend.graph import SharingGraph
from lowtide.backend.shared import SharedBudget
from lowtide.errors import PlanError
from lowtide.pipeline import Settings

_OPTIONS = ("budget", "total_budget", "reserve", "planner", "compiler", "seed")
_BUDGETS: weakref.WeakSet[SharedBudget] = weakref.WeakSet()  # each is owned by its graphs


def backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The planned form of ``module``. ``options`` are those of ``lowtide.rematerialize``; ``compiler`` defaults to
    ``"inductor"``. Raises ``PlanError`` for options that make no sense."""
    if mode not in (None, "default"):
        raise PlanError(f'torch.compile(mode={mode!r}) means nothing to backend="lowtide"; give options instead.')
    return SharingGraph(module, shared_budget(options or {}))


def shared_budget(options: Mapping[str, Any]) -> SharedBudget:
    """One per ``torch.compile``: graphs that come with the same options object, as it was, belong together."""
    for known in _BUDGETS:
        if known.belongs_to(options):
            return known
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise PlanError(f'backend="lowtide" has no option {unknown[0]!r}; it takes {", ".join(_OPTIONS)}.')
    if options.get("total_budget") is not None:
        raise PlanError('backend="lowtide" shares a budget= among graphs; total_budget= is for lowtide.rematerialize.')
    shared = SharedBudget(Settings(**{"compiler": "inductor", **options}), options)
    _BUDGETS.add(shared)
    return shared


def register() -> None:
    """Make the backend known by name, for installations without its entry point."""
    from torch._dynamo.backends import registry

    if "lowtide" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="lowtide")

"""The backend that ``torch.compile`` calls, once per graph that Dynamo makes.

Dynamo guards and breaks the program; each of its graphs is captured, planned and run as a model is, when it is first called
with real tensors, and anew for other shapes. The graphs of one ``torch.compile`` share one budget, see
``parts.shared``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.backend.assigned_data import write_assigned_data
from lowtide.errors import NoGradientError, PlanError
from lowtide.runtime.parts.shared import SharedBudget
from lowtide.runtime.parts.sharing_forward import SharingForward
from lowtide.settings import Settings

_OPTIONS = (
    "budget", "total_budget", "reserve", "planner", "compiler", "seed", "chunked_loss", "offload", "offload_budget",
)  # fmt: skip
_BUDGETS: weakref.WeakSet[GraphsBudget] = weakref.WeakSet()  # each is owned by its graphs


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
    write_assigned_data(module)
    return SharingGraph(module, shared_budget(options or {}))


class GraphsBudget(SharedBudget):
    """Of the graphs of one ``torch.compile``, which came with this ``options`` object."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(Settings(**{"compiler": "inductor", **options}))
        self.search.brief = "planner" not in options
        self._options = options, dict(options)

    def belongs_to(self, options: Mapping[str, Any]) -> bool:
        """Whether this is the very object, as it was."""
        known, contents = self._options
        return known is options and contents == options


def shared_budget(options: Mapping[str, Any]) -> GraphsBudget:
    """One per ``torch.compile``: graphs that come with the same options object, as it was, belong together."""
    for known in _BUDGETS:
        if known.belongs_to(options):
            return known
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise PlanError(f'backend="lowtide" has no option {unknown[0]!r}; it takes {", ".join(_OPTIONS)}.')
    if options.get("total_budget") is not None:
        raise PlanError('backend="lowtide" shares a budget= among graphs; total_budget= is for lowtide.rematerialize.')
    shared = GraphsBudget(options)
    _BUDGETS.add(shared)
    return shared


def register() -> None:
    """Make the backend known by name, for installations without its entry point."""
    from torch._dynamo.backends import registry

    if "lowtide" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="lowtide")


class SharingGraph(SharingForward):
    """One of Dynamo's graphs, callable as Dynamo calls it."""

    def __init__(self, module: torch.nn.Module, shared: SharedBudget) -> None:
        super().__init__(module, shared)
        self.module = module  # the base class only refers to it
        # Why Dynamo ended the graph: at a break another one follows.
        self.more_follow = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
        self.untrained = False  # whether it is a teacher's, say: Dynamo cuts graphs where it must

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.untrained:
            return self.original_forward(*args, **kwargs)
        try:
            return super().call(*args, **kwargs)
        except NoGradientError:
            self.untrained = True
            return self.original_forward(*args, **kwargs)

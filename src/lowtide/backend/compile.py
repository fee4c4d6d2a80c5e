"""The backend that ``torch.compile`` calls for each graph that Dynamo makes.

Dynamo guards and breaks the program. Each graph is captured, planned and run like a model, when it is first called with
real tensors, and again for other shapes. The graphs of one ``torch.compile`` share one budget, see ``parts.shared``.
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
_BUDGETS: weakref.WeakSet[GraphsBudget] = weakref.WeakSet()  # kept alive by their graphs


def backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The planned form of ``module``. ``options``: as for ``lowtide.rematerialize``; ``compiler`` defaults to
    ``"inductor"``. Raises ``PlanError`` for invalid options."""
    if mode not in (None, "default"):
        raise PlanError(f'torch.compile(mode={mode!r}) means nothing to backend="lowtide"; give options instead.')
    write_assigned_data(module)
    return SharingGraph(module, shared_budget(options or {}))


class GraphsBudget(SharedBudget):
    """The budget of the graphs of one ``torch.compile``, identified by its ``options`` object."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(Settings(**{"compiler": "inductor", **options}))
        self.search.brief = "planner" not in options
        self._options = options, dict(options)

    def belongs_to(self, options: Mapping[str, Any]) -> bool:
        """Whether ``options`` is the same object with the same content."""
        known, contents = self._options
        return known is options and contents == options


def shared_budget(options: Mapping[str, Any]) -> GraphsBudget:
    """The budget for this ``torch.compile``: graphs with the same, unchanged options object belong together."""
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
    """Register the backend by name, for installations without its entry point."""
    from torch._dynamo.backends import registry

    if "lowtide" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="lowtide")


class SharingGraph(SharingForward):
    """One of Dynamo's graphs, callable as Dynamo calls it."""

    def __init__(self, module: torch.nn.Module, shared: SharedBudget) -> None:
        super().__init__(module, shared)
        self.module = module  # the base class has only a weak reference
        # If Dynamo ended the graph at a break, another one follows.
        self.more_follow = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
        self.untrained = False  # no gradients, as in a teacher model's graph

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.untrained:
            return self.original_forward(*args, **kwargs)
        try:
            return super().call(*args, **kwargs)
        except NoGradientError:
            self.untrained = True
            return self.original_forward(*args, **kwargs)

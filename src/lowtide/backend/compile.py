"""The backend that ``torch.compile`` calls, once per graph that Dynamo makes.

Dynamo guards and breaks the program; each of its graphs is captured, planned and run as a model is, when it is first called
with real tensors, and anew for other shapes. The graphs of one ``torch.compile`` share one budget, see
``backend.shared``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.backend.shared import SharedBudget
from lowtide.capture import Captured
from lowtide.errors import NoGradientError, PlanError
from lowtide.pipeline import fused
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.runtime.entry import Entry, Sample
from lowtide.runtime.model import Rematerialized
from lowtide.settings import Settings

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


class SharingGraph(Rematerialized):
    """One of Dynamo's graphs, callable as Dynamo calls it."""

    def __init__(self, module: torch.nn.Module, shared: SharedBudget) -> None:
        super().__init__(module, dataclasses.replace(shared.settings))
        self.module = module  # the base class only refers to it
        self.shared = shared
        # Why Dynamo ended the graph: at a break another one follows.
        self.more_follow = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
        self._replaced: Entry | None = None  # by what is being planned in the backward pass
        self.untrained = False  # whether it is a teacher's, say: Dynamo cuts graphs where it must

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.untrained:
            return self.original_forward(*args, **kwargs)
        self.shared.enter(self._device(args))
        try:
            return super().__call__(*args, **kwargs)
        except NoGradientError:
            self.untrained = True
            return self.original_forward(*args, **kwargs)

    def _device(self, args: Sequence[Any]) -> torch.device:
        tensors = (each for each in (*args, *self.module.parameters()) if isinstance(each, torch.Tensor))
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = super().run(entry, inputs)
        call = next((getattr(output.grad_fn, "call", None) for output in outputs if output.grad_fn is not None), None)
        self.shared.add(self, entry, inputs, call)
        return outputs

    def planned(self, captured: Captured, sample: Sample) -> tuple[Program, Plan]:
        program = fused(captured.program, self.settings)
        return program, self.shared.plan(program, self._replaced, self.more_follow)

    def entry_for(self, mask: GradientMask, old: Entry) -> Entry:
        """In the backward pass, in the place of what ran in the forward pass."""
        self._replaced = old
        try:
            new = super().entry_for(mask, old)
        finally:
            self._replaced = None
        for one in self.shared.ran:
            if one.entry is old:
                one.entry = new
        return new

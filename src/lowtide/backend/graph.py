"""One of Dynamo's graphs as a rematerialized model that shares its budget with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowtide.backend.shared import SharedBudget
from lowtide.capture import Captured
from lowtide.errors import NoGradientError
from lowtide.lower import lower
from lowtide.pipeline import fused
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.runtime.entry import Entry, Sample
from lowtide.runtime.model import Rematerialized


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

    def replan(self, plans: Mapping[Entry, Plan]) -> None:
        """Run these by other plans from now on."""
        for key, entries in self.entries.items():
            self.entries[key] = [_replanned(entry, plans[entry]) if entry in plans else entry for entry in entries]
            for entry in self.entries[key]:
                entry.for_masks.clear()
                entry.for_masks[entry.program.mask] = entry


def _replanned(entry: Entry, plan: Plan) -> Entry:
    return dataclasses.replace(entry, plan=plan, lowered=lower(entry.program, plan.schedule))

"""The planned ``forward`` of a program that shares a budget with others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture import Captured
from lowtide.capture.model_state import named_modules
from lowtide.capture.trace.patches import replaced
from lowtide.memory.allocators import allocated_bytes
from lowtide.memory.collector import collect_young, collector_held
from lowtide.pipeline import Finish, costs_from, fused
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.runtime.calls.call import call_of
from lowtide.runtime.parts.shared import SharedBudget
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry, Sample, Signature
from lowtide.runtime.programs.kin import FamilyCall


class SharingForward(Planned):
    """A module that runs by the plans of ``shared``. ``more_follow``: whether other programs run after it in the same
    step."""

    more_follow = True
    shares_budget = True

    def __init__(self, module: nn.Module, shared: SharedBudget) -> None:
        super().__init__(module, dataclasses.replace(shared.settings, planning="wait"))
        self.shared = shared
        self.adapts = shared.settings.adapts
        self._replaced: Entry | None = None  # the entry that a plan made in the backward pass replaces

    def call(self, *args: Any, **kwargs: Any) -> Any:
        parameters = (one for _, module in named_modules(self.model) for one in module._parameters.values())
        self.shared.enter(device_of(itertools.chain(args, parameters)))
        return super().call(*args, **kwargs)

    def _run_as_it_is(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.shared.go_on()
        return super()._run_as_it_is(args, kwargs)

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = super().run(entry, inputs)
        self.shared.add(self, entry, inputs, call_of(outputs))
        return outputs

    def room_for_copies(self, entry: Entry) -> int:
        return self.shared.spare.bytes

    def _make(
        self, key: Signature, sample: Sample, old: Entry | None = None, mask: GradientMask | None = None
    ) -> Entry:
        collect_young()  # free garbage of code between programs
        self.shared.count()
        before = allocated_bytes(self.shared.between.device) or 0
        with collector_held():
            made = super()._make(key, sample, old, mask)
            collect_young()  # free the capture's garbage, which must not count as kept
        kept = (allocated_bytes(self.shared.between.device) or 0) - before
        if kept >= 0:
            self.shared.between.set_aside(kept)
        else:  # older garbage was freed too
            self.shared.count()
        return made

    def planned(self, captured: Captured, sample: Sample, finish: Finish, **known: Any) -> tuple[Program, Plan]:
        program = finish(fused(captured.program, self.settings))
        return program, self.shared.plan(self, program, self._replaced, self.more_follow)

    def _adapted(self, member: FamilyCall, finish: Finish) -> tuple[Program, Plan]:
        program = finish(member.captured.program)
        with self.shared.measuring(self._replaced, self.more_follow):
            costs = costs_from(program, member.branch.measured)
        return program, self.shared.plan(self, program, self._replaced, self.more_follow, costs)

    def entry_for(self, mask: GradientMask, old: Entry, inputs: Sequence[torch.Tensor]) -> Entry:
        """Make the entry in the backward pass, in place of the one that ran forward."""
        with replaced(self, "_replaced", old):
            new = super().entry_for(mask, old, inputs)
        for one in self.shared.ran:
            if one.entry is old:
                one.entry = new
        return new


def device_of(values: Iterable[Any]) -> torch.device:
    """The device of the first tensor that is not on a CPU, else the CPU."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

"""One stage of a modelled pipeline: its micro-batches in flight, and the memory that the schedule holds for it.

The schedule is ``Schedule1F1B`` of ``torch.distributed.pipelining``: a stage first runs forward for as many
micro-batches as there are stages from it to the last, then one backward and one forward pass in turn.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowtide.cost.links import Link, collective_ns
from lowtide.cost.workspaces import with_room_between
from lowtide.errors import PlanError
from lowtide.ir import Schedule
from lowtide.pipeline import first_form
from lowtide.planning import Plan, make_plan
from lowtide.sharing import Member, Share
from lowtide.sharing.stages import Calls
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``number`` (from 0) of ``stages``. ``kept_bytes``: what the schedule holds outside the passes, beside the
    inputs of one micro-batch. ``sent_bytes``: of a micro-batch to the next stage; their gradients come back; each
    transfer takes ``send_ns``."""

    number: int
    stages: int
    micro_batches: int
    kept_bytes: int = 0
    sent_bytes: int = 0
    send_ns: int = 0

    @property
    def in_flight(self) -> int:
        """The most micro-batches that wait for their backward pass, including the running one."""
        return min(self.stages - self.number, self.micro_batches)

    @property
    def last(self) -> bool:
        return self.number == self.stages - 1

    @property
    def passes(self) -> list[tuple[bool, int]]:
        """All passes in the order they run, as (whether backward, micro-batch)."""
        found = [(False, number) for number in range(self.in_flight)]
        for number in range(self.micro_batches):
            ahead = number + self.in_flight
            found += [(True, number), *([(False, ahead)] if ahead < self.micro_batches else [])]
        return found

    def __str__(self) -> str:
        kept = format_bytes(self.kept_bytes)
        return f"{self.in_flight} of {self.micro_batches} micro-batches in flight, {kept} kept for them"

    def holding(self, member: Member, input_bytes: int, received_bytes: int, link: Link) -> Stage:
        """The stage with the memory and transfers of ``member``'s program. The schedule holds inputs (or buffers for
        them) of all micro-batches, gradients of ``received`` inputs, and buffers for the gradients of what is sent, or
        the last stage's outputs."""
        sent, count = member.output_bytes, self.micro_batches
        kept = (count - 1) * input_bytes + count * (sent + (received_bytes if self.number else 0))
        if self.last:
            return replace(self, kept_bytes=kept)
        return replace(self, kept_bytes=kept, sent_bytes=sent, send_ns=collective_ns("send", sent, 2, link))

    def peak_bytes(self, member: Member, schedule: Schedule) -> int:
        """The peak of the passes, including all in flight."""
        return self._calls(member).peak_bytes(member.footprint(schedule))

    def plan(self, member: Member, budget_bytes: int, planner: str, **options: Any) -> Plan:
        """A plan with which all in flight fits. Raises ``InfeasibleBudgetError``."""
        both = planner, first_form(planner)
        plannings = (functools.partial(_planned, planner=each, **options) for each in both)
        return self._calls(member).plan(budget_bytes, *plannings)

    def _calls(self, member: Member) -> Calls:
        return Calls(member, self.in_flight, accumulated=self.micro_batches > 1)


def stage_of(sizes: Mapping[str, int], number: int | None, micro_batches: int | None) -> Stage | None:
    """The stage of a mesh with these ``sizes``; ``None`` if it has no pipeline. Raises ``PlanError``."""
    if "pp" not in sizes:
        if number is None and micro_batches is None:
            return None
        raise PlanError('a stage and micro-batches are those of a pipeline; give a mesh with pp=, such as "pp=4,dp=8".')
    if micro_batches is None:
        raise PlanError("a mesh with pp= runs micro-batches; give their number (micro_batches=, --micro-batches).")
    if not _whole(micro_batches) or micro_batches < 1:
        raise PlanError(f"a pipeline runs 1 micro-batch or more, not {micro_batches!r}.")
    if number is None or not _whole(number) or not 0 <= number < sizes["pp"]:
        raise PlanError(f"stage {number!r} is none of pp={sizes['pp']}, whose stages are 0 to {sizes['pp'] - 1}.")
    return Stage(number, sizes["pp"], micro_batches)


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _planned(member: Member, share: Share, **options: Any) -> Plan:
    graph, costs = member.program.graph, with_room_between(member.program, member.costs, share.between_bytes)
    return make_plan(graph, costs, budget=share.budget_bytes, **options)

"""Sharing a budget among the blocks of a model that are planned one by one.

Between its two passes a block holds what it saves while the others run. So every block is given two numbers: the bytes that
it may save, and the bytes that it may take while it runs itself, with what all the blocks before it have saved. The more
the blocks save, the less each recomputes, and the less room is left for the one that is running. One fraction ``f`` decides
for all: a block saves at most what it hands on plus ``f`` of what it would save beyond that without a plan. The largest
fraction that fits is found by bisection; blocks with equal programs share a plan.

Planners know nothing of this: what must be free when the forward pass ends is a workspace of the arriving gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.capture import Program
from lowtide.errors import InfeasibleBudgetError
from lowtide.integrations.agreement import program_key
from lowtide.integrations.surroundings import SCALAR_BYTES, Moment
from lowtide.ir import Costs, Schedule, keep_all_schedule, simulate
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.pipeline import Settings, make_program_plan, program_costs
from lowtide.report.modules import live_at_boundary

_STEPS = 5  # of the bisection
_QUICK = "auto{effort=1}"


@dataclass(frozen=True, slots=True)
class Part:
    """A block within the whole: the bytes that it saves, those of them that are still there when its backward pass begins, and
    the peaks of its passes. Without ``settings`` it keeps all."""

    saved_bytes: int
    entering_bytes: int
    forward_bytes: int
    backward_bytes: int
    settings: Settings | None = None


def peak_bytes(around: Sequence[Moment], parts: Sequence[Part]) -> int:
    """The whole pass's peak with these parts."""
    return max(
        moment.bytes + _own(parts, moment) + sum(parts[block].saved_bytes for block in moment.saved)
        for moment in around
    )


def _own(parts: Sequence[Part], moment: Moment) -> int:
    if moment.running < 0:
        return parts[moment.entering].entering_bytes if moment.entering >= 0 else 0
    part = parts[moment.running]
    return part.backward_bytes if moment.backward else part.forward_bytes


@dataclass(frozen=True, eq=False)
class Block:
    """A block's own program and its costs."""

    program: Program
    costs: Costs

    @staticmethod
    def of(program: Program) -> Block:
        return Block(program, program_costs(program))

    @functools.cached_property
    def unplanned(self) -> Part:
        """The block as PyTorch runs it, which writes over nothing and may keep the numbers that operators are given."""
        part = part_of(self, keep_all_schedule(self.program.graph.without_overwrites()))
        scalars = SCALAR_BYTES * self.program.graph.forward_ops
        return Part(
            part.saved_bytes + scalars,
            part.entering_bytes + scalars,
            part.forward_bytes + scalars,
            part.backward_bytes + scalars,
        )

    @property
    def handed_on_bytes(self) -> int:
        """Bytes of the forward outputs: what stays whatever is recomputed."""
        graph = self.program.graph
        storages = {graph.values[value].storage for value in graph.forward_outputs}
        return sum(int(self.costs.storage_bytes[storage]) for storage in storages)

    @property
    def arriving_bytes(self) -> int:
        """Bytes of the gradients that come back for the outputs."""
        graph = self.program.graph
        arriving = [op.outputs[0] for op in graph.ops if op.target == TANGENT_TARGET]
        return sum(int(self.costs.storage_bytes[graph.values[value].storage]) for value in arriving)

    @property
    def let_go_bytes(self) -> int:
        """Bytes of forward outputs that the block itself does not read: in its backward pass nobody holds them any more."""
        graph = self.program.graph
        read = {graph.values[value].storage for op in graph.ops for value in op.inputs}
        handed_on = {graph.values[value].storage for value in graph.forward_outputs}
        return sum(int(self.costs.storage_bytes[storage]) for storage in handed_on - read)


def part_of(block: Block, schedule: Schedule, settings: Settings | None = None) -> Part:
    graph, costs, boundary = block.program.graph, block.costs, schedule.boundary
    timeline = simulate(graph, costs, schedule).timeline
    saved = sum(int(costs.storage_bytes[storage]) for storage in live_at_boundary(graph, schedule))
    backward = int(timeline[boundary:].max(initial=0)) - block.let_go_bytes
    forward = int(timeline[:boundary].max(initial=0))
    return Part(saved, max(saved - block.let_go_bytes, 0), forward, max(backward, 0), settings)


def choose(blocks: Sequence[Block], around: Sequence[Moment], settings: Settings, budget_bytes: int) -> list[Part]:
    """Parts that stay within the budget and recompute little. Raises ``InfeasibleBudgetError`` where none do."""
    unplanned = [block.unplanned for block in blocks]
    if peak_bytes(around, unplanned) <= budget_bytes:
        return unplanned
    quick = dataclasses.replace(settings, planner=_QUICK)
    found = planned_parts(blocks, around, quick, budget_bytes, 0.0)
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        try:
            found = planned_parts(blocks, around, quick, budget_bytes, middle)
            low = middle
        except InfeasibleBudgetError:
            high = middle
    return found if settings.planner == _QUICK else planned_parts(blocks, around, settings, budget_bytes, low)


def planned_parts(
    blocks: Sequence[Block], around: Sequence[Moment], settings: Settings, budget_bytes: int, fraction: float
) -> list[Part]:
    """A plan per block where all save what ``fraction`` allows. Raises ``InfeasibleBudgetError``."""
    limits = []
    for block in blocks:
        least = block.handed_on_bytes
        limits.append(least + int(fraction * max(block.unplanned.saved_bytes - least, 0)))
    rooms = _rooms(blocks, around, limits, budget_bytes)
    keys = [program_key(block.program, limit) for block, limit in zip(blocks, limits, strict=True)]
    made: dict[str, Part] = {}
    for block, limit, key in zip(blocks, limits, keys, strict=True):
        if key not in made:
            room = min(r for r, other in zip(rooms, keys, strict=True) if other == key)
            made[key] = _planned(block, settings, room, limit, budget_bytes)
    chosen = [made[key] for key in keys]
    peak = peak_bytes(around, chosen)
    if peak > budget_bytes:
        raise _too_little(budget_bytes, peak)
    return chosen


def _rooms(blocks: Sequence[Block], around: Sequence[Moment], limits: Sequence[int], budget_bytes: int) -> list[int]:
    """For each block, what its plan may take while it runs, when all blocks save what they may."""
    rooms = [budget_bytes] * len(limits)
    for moment in around:
        if moment.running >= 0:
            taken = moment.bytes + sum(limits[block] for block in moment.saved)
            let_go = blocks[moment.running].let_go_bytes if moment.backward else 0  # but planners count it to the end
            rooms[moment.running] = min(rooms[moment.running], budget_bytes - taken + let_go)
    return rooms


def _planned(block: Block, settings: Settings, room: int, limit: int, budget_bytes: int) -> Part:
    """The part of a block whose plan may take ``room`` while it runs and save ``limit``."""
    if room <= limit:
        raise _too_little(budget_bytes, budget_bytes + limit - room + 1)
    settings = dataclasses.replace(settings, budget=room, between_bytes=max(room - limit - block.arriving_bytes, 0))
    try:
        plan = make_program_plan(block.program, settings)
    except InfeasibleBudgetError as error:
        raise _too_little(budget_bytes, budget_bytes + error.minimum_bytes - room) from error
    return part_of(block, plan.schedule, settings)


def _too_little(budget_bytes: int, minimum_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no plans of the blocks fit into {budget_bytes} bytes together; about {minimum_bytes} bytes would do. Raise the "
        "budget, make the batch or the sequence smaller, or shard more and smaller blocks.",
        minimum_bytes=minimum_bytes,
    )

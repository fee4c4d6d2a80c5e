"""Sharing a budget among programs of one pass that are planned one by one: blocks of a model, graphs of ``torch.compile``.

Between its two passes a block holds what it saves while the others run. So every block is given two numbers: the bytes that
it may save, and the bytes that it may take while it runs itself, with what all the blocks before it have saved. The more
the blocks save, the less each recomputes, and the less room is left for the one that is running. A fraction ``f`` decides:
a block saves at most what it hands on plus ``f`` of what it would save beyond that without a plan. The largest fraction that
fits for all is found by bisection, then single programs get more or less where that saves time; blocks with equal programs and
fractions share a plan.

Planners know nothing of this: what must be free when the forward pass ends is a workspace of the arriving gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.capture import Program
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Costs, Schedule, keep_all_schedule, simulate
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.pipeline import Settings, make_program_plan, program_costs
from lowtide.planning import Plan
from lowtide.report.modules import live_at_boundary
from lowtide.sharing.agreement import program_key

SCALAR_BYTES = 8  # what runs eagerly may keep a number that an operator was given, as a tensor, for the backward pass

_STEPS = 5  # of the bisection
_ROUNDS, _LONGER = 2, 1  # of refinement: over all programs, and times as many plans as before it
_QUICK = "auto{effort=1}"
_RAISES = 8  # of a budget that is too small, until one is met
_ALTERNATIVES = (0.25, 0.5, 0.75)  # where saving the least leaves too little to compute all of it again


@dataclass(frozen=True, slots=True)
class Moment:
    """``bytes`` without the blocks' own; the block that is running, or -1; the blocks that hold what they saved (as often as
    they ran); and the one whose backward pass is about to begin, which holds that without its outputs, or -1."""

    bytes: int
    running: int
    backward: bool
    saved: tuple[int, ...]
    entering: int = -1


@dataclass(frozen=True, slots=True)
class Part:
    """A block within the whole: the bytes that it saves, those of them that are still there when its backward pass begins, and
    the peaks of its passes. Without ``settings`` and ``plan`` it keeps all."""

    saved_bytes: int
    entering_bytes: int
    forward_bytes: int
    backward_bytes: int
    settings: Settings | None = None
    plan: Plan | None = None


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
    """A block's own program and its costs. ``outputs_held``: somebody else may hold what it returns to the end."""

    program: Program
    costs: Costs
    outputs_held: bool = False

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
        if self.outputs_held:
            return 0
        graph = self.program.graph
        read = {graph.values[value].storage for op in graph.ops for value in op.inputs}
        handed_on = {graph.values[value].storage for value in graph.forward_outputs}
        return sum(int(self.costs.storage_bytes[storage]) for storage in handed_on - read)


def part_of(block: Block, schedule: Schedule, settings: Settings | None = None, plan: Plan | None = None) -> Part:
    graph, costs, boundary = block.program.graph, block.costs, schedule.boundary
    timeline = simulate(graph, costs, schedule).timeline
    saved = sum(int(costs.storage_bytes[storage]) for storage in live_at_boundary(graph, schedule))
    backward = int(timeline[boundary:].max(initial=0)) - block.let_go_bytes
    forward = int(timeline[:boundary].max(initial=0))
    return Part(saved, max(saved - block.let_go_bytes, 0), forward, max(backward, 0), settings, plan)


def choose(blocks: Sequence[Block], around: Sequence[Moment], settings: Settings, budget_bytes: int) -> list[Part]:
    """Parts that stay within the budget and recompute little. Raises ``InfeasibleBudgetError`` where none do."""
    unplanned = [block.unplanned for block in blocks]
    if peak_bytes(around, unplanned) <= budget_bytes:
        return unplanned
    by_search = settings.planner.startswith("auto")
    quick = Choice(blocks, around, dataclasses.replace(settings, planner=_QUICK) if by_search else settings)
    try:
        fractions = quick.refined(quick.shared_fraction(budget_bytes), budget_bytes)
    except InfeasibleBudgetError as error:
        raise _too_little(budget_bytes, quick.least(error.minimum_bytes)) from None
    if quick.settings == settings:
        return quick.parts(fractions, budget_bytes)
    return Choice(blocks, around, settings).parts(fractions, budget_bytes)


class Choice:
    """Of a fraction for every block: of what it would save without a plan, beyond what it hands on, the part that it may.

    Plans are kept: one that was made for more room is the best for less, too, where it does with that.
    """

    def __init__(self, blocks: Sequence[Block], around: Sequence[Moment], settings: Settings) -> None:
        self.blocks = blocks
        self.around = around
        self.settings = settings
        self._programs = [program_key(block.program, None) for block in blocks]
        self._in_the_way = {index for moment in around for index in moment.saved}
        # By program and limit: for how much room a plan was made, and what it was.
        self._made: dict[tuple[str, int], list[tuple[int, Part]]] = {}
        self._asked = 0  # plans

    def parts(self, fractions: Sequence[float], budget_bytes: int) -> list[Part]:
        """A plan per block where each saves what its fraction allows; equal programs with equal fractions have one plan.
        Raises ``InfeasibleBudgetError``."""
        limits = []
        for index, (block, fraction) in enumerate(zip(self.blocks, fractions, strict=True)):
            least, most = block.handed_on_bytes, block.unplanned.saved_bytes
            limits.append(least + int(fraction * max(most - least, 0)) if index in self._in_the_way else most)
        rooms = _rooms(self.blocks, self.around, limits, budget_bytes)
        keys = list(zip(self._programs, limits, strict=True))
        shared: dict[tuple[str, int], int] = {}
        for key, room in zip(keys, rooms, strict=True):
            shared[key] = min(room, shared.get(key, room))
        chosen = [
            self._part(block, key, shared[key], budget_bytes) for block, key in zip(self.blocks, keys, strict=True)
        ]
        peak = peak_bytes(self.around, chosen)
        if peak > budget_bytes:
            raise _too_little(budget_bytes, peak)
        return chosen

    def _part(self, block: Block, key: tuple[str, int], room: int, budget_bytes: int) -> Part:
        made = self._made.setdefault(key, [])
        for asked, part in made:
            if max(part.forward_bytes, part.backward_bytes + block.let_go_bytes) <= room <= asked:
                return part
        self._asked += 1
        part = _planned(block, self.settings, room, key[1], budget_bytes)
        made.append((room, part))
        return part

    def shared_fraction(self, budget_bytes: int) -> list[float]:
        """About the largest that all blocks can have. Raises ``InfeasibleBudgetError``."""
        low, high = self._first_that_fits(budget_bytes), 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            try:
                self.parts([middle] * len(self.blocks), budget_bytes)
                low = middle
            except InfeasibleBudgetError:
                high = middle
        return [low] * len(self.blocks)

    def refined(self, fractions: Sequence[float], budget_bytes: int) -> list[float]:
        """``fractions`` with more for some programs and less for others, as long as that saves time."""
        best, time = list(fractions), self._time(self.parts(fractions, budget_bytes))
        most = (1 + _LONGER) * self._asked
        for program in [*dict.fromkeys(self._programs)] * _ROUNDS:
            if self._asked >= most:
                break
            mine = [index for index, other in enumerate(self._programs) if other == program]
            own = best[mine[0]]
            for fraction in (own / 2, (1 + own) / 2, 1.0):
                tried = [fraction if index in mine else other for index, other in enumerate(best)]
                try:
                    taken = self._time(self.parts(tried, budget_bytes))
                except InfeasibleBudgetError:
                    continue
                if taken < time:
                    best, time = tried, taken
        return best

    def _time(self, parts: Sequence[Part]) -> int:
        return sum(part.plan.time_ns for part in parts if part.plan is not None)

    def _first_that_fits(self, budget_bytes: int) -> float:
        """A fraction with which the budget is met. Raises ``InfeasibleBudgetError``: of the one that needs least."""
        errors = []
        for fraction in (0.0, *_ALTERNATIVES):
            try:
                self.parts([fraction] * len(self.blocks), budget_bytes)
                return fraction
            except InfeasibleBudgetError as error:
                errors.append(error)
        raise min(errors, key=lambda error: error.minimum_bytes)

    def least(self, budget_bytes: int) -> int:
        """The first budget from ``budget_bytes`` on that is found to be met."""
        for _ in range(_RAISES):
            try:
                self._first_that_fits(budget_bytes)
                break
            except InfeasibleBudgetError as error:
                budget_bytes = max(error.minimum_bytes, budget_bytes + 1)
        return budget_bytes


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
    """The part of a block whose plan may take ``room`` while it runs and save ``limit``, or more where that cannot be."""
    if room <= block.handed_on_bytes:
        raise _too_little(budget_bytes, budget_bytes + block.handed_on_bytes - room + 1)
    between = max(room - limit - block.arriving_bytes, 0)
    asked = dataclasses.replace(settings, budget=room, between_bytes=between)
    try:
        plan = make_program_plan(block.program, asked, costs=block.costs)
    except InfeasibleBudgetError as error:
        asked = dataclasses.replace(asked, between_bytes=max(between - (error.minimum_bytes - room), 0))
        if not between:
            raise _too_little(budget_bytes, budget_bytes + error.minimum_bytes - room) from error
        try:
            plan = make_program_plan(block.program, asked, costs=block.costs)
        except InfeasibleBudgetError as again:
            raise _too_little(budget_bytes, budget_bytes + again.minimum_bytes - room) from again
    return part_of(block, plan.schedule, asked, plan)


def _too_little(budget_bytes: int, minimum_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no plans of the blocks fit into {budget_bytes} bytes together; about {minimum_bytes} bytes would do. Raise the "
        "budget, make the batch or the sequence smaller, or shard more and smaller blocks.",
        minimum_bytes=minimum_bytes,
    )

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.capture import Program
from lowtide.errors import InfeasibleBudgetError
from lowtide.integrations.agreement import program_key
from lowtide.ir import Costs, Graph, Phase, Schedule, keep_all_schedule, simulate
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.ir.schedule import Compute
from lowtide.pipeline import Settings, make_program_plan, program_costs
from lowtide.report.modules import live_at_boundary

_STEPS = 5  # of the bisection
_QUICK = "auto{effort=1}"


@dataclass(frozen=True, slots=True)
class Part:
    """A block within the whole: the bytes that it saves, and the peaks of its passes. Without ``settings`` it keeps all."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    settings: Settings | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The program around the blocks, step by step: ``bytes[i]`` without the blocks' own; ``fixed_bytes`` come on top.

    ``running[i]`` is the block whose pass step i belongs to, or -1; ``saved[i]`` the blocks that hold what they saved.
    """

    bytes: tuple[int, ...]
    running: tuple[int, ...]
    backward: tuple[bool, ...]
    saved: tuple[tuple[int, ...], ...]
    fixed_bytes: int

    @staticmethod
    def of(graph: Graph, costs: Costs, names: Sequence[str], fixed_bytes: int) -> Surroundings:
        """From the program of the whole model; ``names`` are the blocks' module paths."""
        block = _blocks_of_ops(graph, names)
        storage_bytes, workspace = np.array(costs.storage_bytes), np.array(costs.workspace_bytes)
        for op in graph.ops:
            workspace[op.id] *= block[op.id] < 0
        for storage in graph.storages:
            if storage.base is not None and block[storage.base] >= 0:
                storage_bytes[storage.id] = 0
        outside = dataclasses.replace(costs, storage_bytes=storage_bytes, workspace_bytes=workspace)
        schedule = keep_all_schedule(graph)
        timeline = simulate(graph, outside, schedule).timeline
        steps = [(i, graph.ops[s.op]) for i, s in enumerate(schedule.steps) if isinstance(s, Compute)]
        windows: dict[tuple[int, bool], list[int]] = {}
        for index, op in steps:
            if block[op.id] >= 0:
                windows.setdefault((block[op.id], op.phase is Phase.BACKWARD), []).append(index)
        return _laid_out([(i, int(timeline[i])) for i, _ in steps], windows, fixed_bytes)


def _laid_out(
    levels: list[tuple[int, int]], windows: dict[tuple[int, bool], list[int]], fixed_bytes: int
) -> Surroundings:
    spans = {key: (min(steps), max(steps)) for key, steps in windows.items()}
    blocks = {block for block, _ in spans}
    running, backward, saved = [], [], []
    for index, _ in levels:
        inside = [key for key, (first, last) in spans.items() if first <= index <= last]
        block, is_backward = inside[-1] if inside else (-1, False)
        running.append(block)
        backward.append(is_backward)
        end = len(levels) + levels[-1][0]
        held = [b for b in blocks if b != block and _between(index, spans.get((b, False)), spans.get((b, True)), end)]
        saved.append(tuple(held))
    return Surroundings(tuple(level for _, level in levels), tuple(running), tuple(backward), tuple(saved), fixed_bytes)


def _between(index: int, forward: tuple[int, int] | None, backward: tuple[int, int] | None, end: int) -> bool:
    return (forward[1] if forward else end) < index < (backward[0] if backward else end)


def _blocks_of_ops(graph: Graph, names: Sequence[str]) -> list[int]:
    """The block of every op, or -1. What lies among a block's ops is its own too: sums of gradients know no module."""
    found = [_block(op.module, names) for op in graph.ops]
    spans: dict[tuple[int, Phase], list[int]] = {}
    for op in graph.ops:
        if found[op.id] >= 0:
            spans.setdefault((found[op.id], op.phase), []).append(op.id)
    for (block, _), ops in spans.items():
        found[ops[0] : ops[-1] + 1] = [other if other >= 0 else block for other in found[ops[0] : ops[-1] + 1]]
    return found


def _block(module: str, names: Sequence[str]) -> int:
    return next((i for i, name in enumerate(names) if module == name or module.startswith(f"{name}.")), -1)


def peak_bytes(around: Surroundings, parts: Sequence[Part]) -> int:
    """The whole pass's peak with these parts."""
    return around.fixed_bytes + max(
        level + _own(parts, running, backward) + sum(parts[i].saved_bytes for i in saved)
        for level, running, backward, saved in zip(
            around.bytes, around.running, around.backward, around.saved, strict=True
        )
    )


def _own(parts: Sequence[Part], running: int, backward: bool) -> int:
    if running < 0:
        return 0
    return parts[running].backward_bytes if backward else parts[running].forward_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block's own program, its costs, and the part that it is without a plan."""

    program: Program
    costs: Costs
    unplanned: Part

    @staticmethod
    def of(program: Program) -> Block:
        costs = program_costs(program)
        return Block(program, costs, part_of(program, costs, keep_all_schedule(program.graph)))

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


def part_of(program: Program, costs: Costs, schedule: Schedule, settings: Settings | None = None) -> Part:
    timeline = simulate(program.graph, costs, schedule).timeline
    saved = sum(int(costs.storage_bytes[storage]) for storage in live_at_boundary(program.graph, schedule))
    boundary = schedule.boundary
    return Part(saved, int(timeline[:boundary].max(initial=0)), int(timeline[boundary:].max(initial=0)), settings)


def choose(blocks: Sequence[Block], around: Surroundings, settings: Settings, budget_bytes: int) -> list[Part]:
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
    blocks: Sequence[Block], around: Surroundings, settings: Settings, budget_bytes: int, fraction: float
) -> list[Part]:
    """A plan per block where all save what ``fraction`` allows. Raises ``InfeasibleBudgetError``."""
    limits = []
    for block in blocks:
        least = block.handed_on_bytes
        limits.append(least + int(fraction * max(block.unplanned.saved_bytes - least, 0)))
    rooms = _rooms(around, limits, budget_bytes)
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


def _rooms(around: Surroundings, limits: Sequence[int], budget_bytes: int) -> list[int]:
    """For each block, what is left for it while it runs, when all blocks save what they may."""
    rooms = [budget_bytes] * len(limits)
    for level, running, saved in zip(around.bytes, around.running, around.saved, strict=True):
        if running >= 0:
            taken = around.fixed_bytes + level + sum(limits[i] for i in saved)
            rooms[running] = min(rooms[running], budget_bytes - taken)
    return rooms


def _planned(block: Block, settings: Settings, room: int, limit: int, budget_bytes: int) -> Part:
    """The part of a block that may take ``room`` while it runs and save ``limit``."""
    if room <= limit:
        raise _too_little(budget_bytes, budget_bytes + limit - room + 1)
    settings = dataclasses.replace(settings, budget=room, between_bytes=max(room - limit - block.arriving_bytes, 0))
    try:
        plan = make_program_plan(block.program, settings)
    except InfeasibleBudgetError as error:
        raise _too_little(budget_bytes, budget_bytes + error.minimum_bytes - room) from error
    return part_of(block.program, block.costs, plan.schedule, settings)


def _too_little(budget_bytes: int, minimum_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no plans of the blocks fit into {budget_bytes} bytes together; about {minimum_bytes} bytes would do. Raise the "
        "budget, make the batch or the sequence smaller, or shard more and smaller blocks.",
        minimum_bytes=minimum_bytes,
    )

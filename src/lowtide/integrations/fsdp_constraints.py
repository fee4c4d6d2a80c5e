"""What must fit at each point of a sharded model's step beside what its blocks hold: FSDP2's buffers, and all around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lowtide.integrations.gathers import Gathers
from lowtide.ir import Costs, Graph, Phase, Schedule, keep_all_schedule, simulate
from lowtide.ir.schedule import Compute, Free
from lowtide.sharing import SCALAR_BYTES, Constraint

_Pass = tuple[int, bool]  # a block, and whether it is its backward pass


def constraints_of(graph: Graph, costs: Costs, names: Sequence[str], gathers: Gathers) -> list[Constraint]:
    """From the program of the whole model; ``names`` are the blocks' module paths.

    One per operator, and one per gather and reduction between operators. PyTorch runs what lies around the blocks, and
    writes over nothing there.
    """
    graph = graph.without_overwrites()
    block = _blocks_of_ops(graph, names)
    schedule = keep_all_schedule(graph)
    steps = [(i, graph.ops[s.op].id) for i, s in enumerate(schedule.steps) if isinstance(s, Compute)]
    spans = _spans(graph, block, steps)
    levels = simulate(graph, _outside(graph, costs, block), schedule).timeline + SCALAR_BYTES * block.count(-1)
    counted_inside = _counted_inside(graph, costs, block, schedule, spans)
    return _laid_out(
        [(i, int(levels[i]), int(levels[i] - counted_inside[i])) for i, _ in steps], schedule, spans, gathers
    )


def _laid_out(
    levels: list[tuple[int, int, int]], schedule: Schedule, spans: dict[_Pass, tuple[int, int]], gathers: Gathers
) -> list[Constraint]:
    entered = {first: one for one, (first, _) in spans.items()}
    left = {last: one for one, (_, last) in spans.items()}
    blocks = {block for block, _ in spans}
    turn = next((index for index, _, _ in levels if index >= schedule.boundary), -1)
    saved: tuple[int, ...] = ()
    found = [Constraint(levels[0][1] + gathers.begin(), -1, False, saved)]
    for index, level, level_inside in levels:
        if index == turn:
            found.append(Constraint(level + gathers.turn(), -1, True, saved))
        if one := entered.get(index):
            others = tuple(block for block in saved if block != one[0])
            entering = one[0] if len(others) < len(saved) else -1
            found.append(Constraint(level + gathers.enter(*one), -1, one[1], others, entering))
        running, backward = next((w for w, (first, last) in spans.items() if first <= index <= last), (-1, False))
        saved = tuple(b for b in blocks if b != running and _saved(index, spans.get((b, False)), spans.get((b, True))))
        own = level_inside if running >= 0 else level
        found.append(Constraint(own + gathers.held_bytes, running, backward, saved))
        if one := left.get(index):
            found.append(Constraint(level + gathers.leave(*one), -1, one[1], saved))
            saved = saved if one[1] else (*saved, one[0])
    found.append(Constraint(levels[-1][1] + gathers.end(), -1, True, saved))
    return found


def _saved(index: int, forward: tuple[int, int] | None, backward: tuple[int, int] | None) -> bool:
    return forward is not None and forward[1] < index and (backward is None or index < backward[0])


def _spans(graph: Graph, block: Sequence[int], steps: Sequence[tuple[int, int]]) -> dict[_Pass, tuple[int, int]]:
    """The first and last step of every block's passes."""
    spans: dict[_Pass, tuple[int, int]] = {}
    for index, op in steps:
        if block[op] >= 0:
            one = (block[op], graph.ops[op].phase is Phase.BACKWARD)
            spans[one] = (spans.get(one, (index, index))[0], index)
    return spans


def _outside(graph: Graph, costs: Costs, block: Sequence[int]) -> Costs:
    """Without what only blocks know: their workspaces, and storages that no other part of the program reads."""
    storage_bytes, workspace = np.array(costs.storage_bytes), np.array(costs.workspace_bytes)
    for op in graph.ops:
        workspace[op.id] *= block[op.id] < 0
    held = {graph.values[value].storage for value in graph.forward_outputs} | _flows(graph, block).keys()
    for storage in graph.storages:
        if storage.base is not None and block[storage.base] >= 0 and storage.id not in held:
            storage_bytes[storage.id] = 0
    return dataclasses.replace(costs, storage_bytes=storage_bytes, workspace_bytes=workspace)


def _flows(graph: Graph, block: Sequence[int]) -> dict[int, list[int]]:
    """Storages of the backward pass that are not only read by the block that makes them, each with the ops that read it."""
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        for storage in {graph.values[value].storage for value in op.inputs}:
            readers.setdefault(storage, []).append(op.id)
    backward = [s for s in graph.storages if s.base is not None and graph.ops[s.base].phase is Phase.BACKWARD]
    read = {storage.id: (block[storage.base or 0], readers.get(storage.id, [])) for storage in backward}
    return {storage: ops for storage, (maker, ops) in read.items() if any(block[op] != maker for op in ops)}


def _counted_inside(
    graph: Graph, costs: Costs, block: Sequence[int], schedule: Schedule, spans: dict[_Pass, tuple[int, int]]
) -> list[int]:
    """Per step, bytes of the gradients passed between blocks and the rest that the running block's own program counts too.

    That counts what the block hands back to the end of its pass, and what arrives until the block has read it.
    """
    made = {step.op: index for index, step in enumerate(schedule.steps) if isinstance(step, Compute)}
    freed = {step.storage: index for index, step in enumerate(schedule.steps) if isinstance(step, Free)}
    inside = [0] * len(schedule.steps)
    for storage, ops in _flows(graph, block).items():
        base, end = graph.storages[storage].base, freed.get(storage, len(schedule.steps))
        if base is None or base not in made:
            continue
        for owner in {block[base], *(block[op] for op in ops)} - {-1}:
            first, last = spans[owner, True]
            if owner != block[base] and any(block[op] != owner and made.get(op, 0) > last for op in ops):
                continue  # somebody else holds it even when the block has let go of it
            for index in range(max(first, made[base]), min(last + 1, end)):
                inside[index] += int(costs.storage_bytes[storage])
    return inside


def _blocks_of_ops(graph: Graph, names: Sequence[str]) -> list[int]:
    """The block of every op, or -1. What lies among a block's ops is its own too: sums of gradients know no module."""
    paths = [f"{name}." for name in names]
    found = [next((i for i, path in enumerate(paths) if f"{op.module}.".startswith(path)), -1) for op in graph.ops]
    spans: dict[tuple[int, Phase], list[int]] = {}
    for op in graph.ops:
        if found[op.id] >= 0:
            spans.setdefault((found[op.id], op.phase), []).append(op.id)
    for (block, _), ops in spans.items():
        found[ops[0] : ops[-1] + 1] = [other if other >= 0 else block for other in found[ops[0] : ops[-1] + 1]]
    return found

"""The pass of a whole model as the blocks see it: what is held at every moment besides what the blocks hold themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lowtide.integrations.gathers import Gathers
from lowtide.ir import Costs, Graph, Phase, Schedule, keep_all_schedule, simulate
from lowtide.ir.schedule import Compute, Free
from lowtide.sharing.choice import SCALAR_BYTES, Moment

_Window = tuple[int, bool]  # a block, and whether it is its backward pass


def moments(graph: Graph, costs: Costs, names: Sequence[str], gathers: Gathers) -> list[Moment]:
    """From the program of the whole model; ``names`` are the blocks' module paths.

    A moment per operator, and one per gather and reduction between operators. PyTorch runs what lies around the blocks, and
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
    levels: list[tuple[int, int, int]], schedule: Schedule, spans: dict[_Window, tuple[int, int]], gathers: Gathers
) -> list[Moment]:
    gathers = gathers.fresh()
    entered = {first: window for window, (first, _) in spans.items()}
    left = {last: window for window, (_, last) in spans.items()}
    blocks = {block for block, _ in spans}
    turn = next((index for index, _, _ in levels if index >= schedule.boundary), -1)
    saved: tuple[int, ...] = ()
    found = [Moment(levels[0][1] + gathers.begin(), -1, False, saved)]
    for index, level, level_inside in levels:
        if index == turn:
            found.append(Moment(level + gathers.turn(), -1, True, saved))
        if window := entered.get(index):
            others = tuple(block for block in saved if block != window[0])
            entering = window[0] if len(others) < len(saved) else -1
            found.append(Moment(level + gathers.enter(*window), -1, window[1], others, entering))
        running, backward = next((w for w, (first, last) in spans.items() if first <= index <= last), (-1, False))
        saved = tuple(b for b in blocks if b != running and _saved(index, spans.get((b, False)), spans.get((b, True))))
        own = level_inside if running >= 0 else level
        found.append(Moment(own + gathers.held_bytes, running, backward, saved))
        if window := left.get(index):
            found.append(Moment(level + gathers.leave(*window), -1, window[1], saved))
            saved = saved if window[1] else (*saved, window[0])
    found.append(Moment(levels[-1][1] + gathers.end(), -1, True, saved))
    return found


def _saved(index: int, forward: tuple[int, int] | None, backward: tuple[int, int] | None) -> bool:
    return forward is not None and forward[1] < index and (backward is None or index < backward[0])


def _spans(graph: Graph, block: Sequence[int], steps: Sequence[tuple[int, int]]) -> dict[_Window, tuple[int, int]]:
    """The first and last step of every block's passes."""
    spans: dict[_Window, tuple[int, int]] = {}
    for index, op in steps:
        if block[op] >= 0:
            window = (block[op], graph.ops[op].phase is Phase.BACKWARD)
            spans[window] = (spans.get(window, (index, index))[0], index)
    return spans


def _outside(graph: Graph, costs: Costs, block: Sequence[int]) -> Costs:
    """Without what only blocks know: their workspaces, and storages that no other part of the program reads."""
    storage_bytes, workspace = np.array(costs.storage_bytes), np.array(costs.workspace_bytes)
    for op in graph.ops:
        workspace[op.id] *= block[op.id] < 0
    outputs = {graph.values[value].storage for value in graph.forward_outputs}
    handed_back = {storage for storage, _, readers in _flows(graph, block) if readers}
    for storage in graph.storages:
        if storage.base is None or block[storage.base] < 0 or storage.id in outputs or storage.id in handed_back:
            continue
        storage_bytes[storage.id] = 0
    return dataclasses.replace(costs, storage_bytes=storage_bytes, workspace_bytes=workspace)


def _flows(graph: Graph, block: Sequence[int]) -> list[tuple[int, int, set[int]]]:
    """Storages of the backward pass, each with the block that makes it and those (-1: none) that read it besides."""
    readers: dict[int, set[int]] = {}
    for op in graph.ops:
        for value in op.inputs:
            readers.setdefault(graph.values[value].storage, set()).add(block[op.id])
    return [
        (storage.id, block[storage.base], readers.get(storage.id, set()) - {block[storage.base]})
        for storage in graph.storages
        if storage.base is not None and graph.ops[storage.base].phase is Phase.BACKWARD
    ]


def _counted_inside(
    graph: Graph, costs: Costs, block: Sequence[int], schedule: Schedule, spans: dict[_Window, tuple[int, int]]
) -> list[int]:
    """Per step, bytes of the gradients passed between blocks and the rest that the running block's own program counts too.

    That counts what the block hands back to the end of its pass, and what arrives until the block has read it.
    """
    made = {step.op: index for index, step in enumerate(schedule.steps) if isinstance(step, Compute)}
    freed = {step.storage: index for index, step in enumerate(schedule.steps) if isinstance(step, Free)}
    inside = [0] * len(schedule.steps)
    for storage, maker, readers in _flows(graph, block):
        base, end = graph.storages[storage].base, freed.get(storage, len(schedule.steps))
        if base not in made or not readers:
            continue
        for owner in {maker, *readers} - {-1}:
            first, last = spans[owner, True]
            if owner != maker and _read_after(graph, storage, block, owner, made, last):
                continue  # somebody else holds it even when the block has let go of it
            for index in range(max(first, made[base]), min(last + 1, end)):
                inside[index] += int(costs.storage_bytes[storage])
    return inside


def _read_after(graph: Graph, storage: int, block: Sequence[int], owner: int, made: dict[int, int], last: int) -> bool:
    values = set(graph.storages[storage].values)
    return any(
        block[op.id] != owner and made.get(op.id, 0) > last for op in graph.ops if not values.isdisjoint(op.inputs)
    )


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

"""Graphs whose operators may write over what they read."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from lowtide.ir import Compute, Costs, Graph, Schedule, is_view


def overwriting(graph: Graph, costs: Costs, seed: int, often: float = 0.7) -> tuple[Graph, Costs]:
    """The same graph where operators with one storage may take over some of the storages that they read by one value;
    they get the size of the first, and take over those of the same size."""
    draw = random.Random(seed)
    sizes = np.array(costs.storage_bytes)
    kept = {graph.values[value].storage for value in (*graph.outputs, *graph.forward_outputs)}
    ops = []
    for op, own in zip(graph.ops, graph.owned, strict=True):
        read = [graph.values[value].storage for value in op.inputs]
        candidates = [
            value
            for value, storage in zip(op.inputs, read, strict=True)
            if not graph.storages[storage].external and storage not in kept and read.count(storage) == 1
        ]
        draw.shuffle(candidates)
        if len(own) != 1 or op.random or op.effect or is_view(graph, op) or not candidates or draw.random() > often:
            ops.append(op)
            continue
        sizes[own[0]] = sizes[graph.values[candidates[0]].storage]
        ops.append(dataclasses.replace(op, overwrites=_of_size(graph, sizes, candidates, int(sizes[own[0]]))))
    return dataclasses.replace(graph, ops=tuple(ops)), dataclasses.replace(costs, storage_bytes=sizes)


def _of_size(graph: Graph, sizes: np.ndarray, values: list[int], size: int) -> tuple[int, ...]:  # type: ignore[type-arg]
    return tuple(value for value in values if sizes[graph.values[value].storage] == size)


def without_overwriting(schedule: Schedule) -> Schedule:
    """The same steps, every result in new memory."""
    steps = (Compute(step.op) if isinstance(step, Compute) else step for step in schedule.steps)
    return Schedule(tuple(steps), schedule.boundary)

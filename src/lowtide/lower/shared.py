"""Tensors that a program shares with its caller: those that must not change between its passes, and those it updates."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program import Program
from lowtide.program.layouts import memory_of


def constants_read(program: Program, after: Collection[int]) -> tuple[tuple[int, bool], ...]:
    """Return the constants whose memory the forward pass reads, each with whether the backward pass, which reads the storages
    ``after``, does too. Constants read by the backward pass alone are read as they are then, as in eager."""
    graph, memory = program.graph, {value: memory_of(tensor) for value, tensor in program.constants.items()}
    read = {graph.values[value].storage for op in graph.ops[: graph.forward_ops] for value in op.inputs}
    storages = {value: graph.values[value].storage for value in program.constants}
    memory_read = {memory[value] for value, storage in storages.items() if storage in read}
    return tuple((value, storage in after) for value, storage in storages.items() if memory[value] in memory_read)


def updated(program: Program) -> tuple[set[int], set[int], set[int]]:
    """Return the storages updated at the end of the forward pass, those updated in the midst of it and read as they are from
    then on (see ``capture.convert.updates``), and of both those updated without a new version."""
    updates = [op for op in program.graph.ops if op.target == UPDATE_TARGET]
    storages = {op.id: program.graph.values[op.inputs[0]].storage for op in updates}
    last = {storages[op.id] for op in updates if not op.outputs}
    unseen = {storages[op.id] for op in updates if "unseen" in program.calls[op.id].kwargs}
    return last, {*storages.values()} - last, unseen


def inner_outputs(program: Program) -> tuple[int, ...]:
    """Return the positions of differentiable forward outputs on which other differentiable outputs depend."""
    results = [result.returned for result in program.results if result.requires_grad]
    outputs = program.graph.forward_outputs
    leading = {outputs[position] for position in results if position is not None}
    inner: set[int] = set()
    for op in reversed(program.graph.ops[: program.graph.forward_ops]):
        if not leading.isdisjoint(op.outputs):
            inner.update(op.inputs)
            leading.update(op.inputs)
    return tuple(i for i in sorted({p for p in results if p is not None}) if outputs[i] in inner)

"""Constants of a program that it computes with in both passes: tensors of the model's that must stay as they are in between."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.program import Program
from lowtide.program.layouts import memory_of


def constants_read(program: Program, after: Collection[int]) -> tuple[tuple[int, bool], ...]:
    """Those whose memory the forward pass reads, each with whether the backward pass reads it, too: its storages are ``after``.
    What the backward pass alone reads is as it is then, as in eager."""
    graph, memory = program.graph, {value: memory_of(tensor) for value, tensor in program.constants.items()}
    read = {graph.values[value].storage for op in graph.ops[: graph.forward_ops] for value in op.inputs}
    storages = {value: graph.values[value].storage for value in program.constants}
    memory_read = {memory[value] for value, storage in storages.items() if storage in read}
    return tuple((value, storage in after) for value, storage in storages.items() if memory[value] in memory_read)

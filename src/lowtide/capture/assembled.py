"""Assemble a program from a converted trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from lowtide.capture.convert.convert import Converted
from lowtide.capture.model_state import State
from lowtide.capture.traced_model import TracedRun
from lowtide.ir import Graph
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.program.overwrites import with_overwrites
from lowtide.program.program import Program
from lowtide.program.results import Result
from lowtide.program.roles import Gradient, Input, Output


def leave_out_unread(graph: fx.Graph, first: int, used: Collection[int]) -> int:
    """Remove the last flat inputs of a joint ``graph`` if nothing reads them, and return how many are left. Inputs before
    number ``first`` stay, and so do those ``used`` otherwise: what a model holds and does not read is no part of its
    program."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["role"], Input)]
    while len(inputs) > first and not inputs[-1].users and len(inputs) - 1 not in used:
        graph.erase_node(inputs.pop())
    return len(inputs)


def assembled(converted: Converted, run: TracedRun, state: State, name: str) -> Program:
    """The program of a model called ``name``, whose traced run was ``converted``."""
    builder = converted.builder
    returned, position, results = _results(converted, run)
    gradients = tuple((role.input, value) for role, value in converted.outputs.items() if isinstance(role, Gradient))
    tangents = tuple(position[number] for number in converted.tangent_outputs)
    arriving = [op.outputs[0] for op in builder.ops if op.target == TANGENT_TARGET]
    read = {value for op in builder.ops for value in op.inputs} | set(returned)
    graph = Graph(
        name=name,
        ops=tuple(builder.ops),
        values=tuple(builder.values),
        storages=builder.storages(),
        inputs=tuple(value.id for value in builder.values if value.producer is None),
        forward_outputs=(*returned, *converted.kept.values()),
        # The caller may hold the gradients that it hands in, so they count to the end (but see ``program.tangents``).
        outputs=tuple(dict.fromkeys((*arriving, *(value for _, value in gradients)))),
        forward_ops=converted.forward_ops,
    )
    program = Program(
        graph=graph,
        calls=tuple(builder.calls),
        metas=tuple(builder.metas),
        inputs=tuple(value if value in read else None for value in converted.inputs),
        constants=converted.constants,
        tangents=tangents,
        gradients=gradients,
        results=tuple(results),
        mask=run.mask,
        state_names=state.names,
        parameters=state.parameters,
        kept=tuple(converted.kept),
        unlinked=tuple(number for number in run.unlinked if number < len(converted.inputs)),
        sums=tuple((role.input, count) for role, count in converted.sums.items()),
    )
    return with_overwrites(program)


def _results(converted: Converted, run: TracedRun) -> tuple[list[int], dict[int, int], list[Result]]:
    """The forward outputs in the order in which the program returns them, the position of each output among them, and
    how each result is made from them. Outputs with a gradient are separate from all others."""
    returned: list[int] = []
    positions: dict[int, int] = {}
    results = []
    for number, (grad, viewed) in enumerate(zip(run.requires_grad, run.viewed, strict=True)):
        if viewed.argument is not None and (viewed.view is None or not grad):
            results.append(Result(grad, argument=viewed.argument, view=viewed.view))
            continue
        value = converted.outputs[Output(number)]
        if grad or value not in returned:
            returned.append(value)
            positions[number] = len(returned) - 1
        place = positions.get(number, returned.index(value))
        results.append(Result(grad, place, viewed.argument, view=viewed.view))
    bases = [None if viewed.result is None else results[viewed.result].returned for viewed in run.viewed]
    return returned, positions, [replace(one, base=base) for one, base in zip(results, bases, strict=True)]

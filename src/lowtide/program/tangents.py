"""Who owns the gradients that arrive for a program's results.

A captured program assumes that its caller may hold them, as ``result.backward(gradient)`` does, so they count to its
end. Nobody else holds the gradient of a loss: the autograd engine hands it over. A program that owns arriving gradients
frees each after the last operator that reads it, as eager does, and may write over it.
"""

from __future__ import annotations

import dataclasses

from lowtide.ir import Graph, keep_all_schedule, simulate
from lowtide.program.overwrites import with_overwrites
from lowtide.program.program import Program
from lowtide.program.sizes import byte_costs

_LEAST_SHARE = 0.01  # of the peak; smaller gradients are not owned


def owns_tangents(graph: Graph) -> bool:
    """Whether the program owns arriving gradients."""
    return not {*graph.arriving} <= {*graph.outputs}


def tangent_bytes(program: Program) -> int:
    """The bytes of arriving gradients that are not themselves gradients of inputs."""
    costs = byte_costs(program)
    return sum(int(costs.storage_bytes[storage]) for storage in program.graph.storages_of(_own(program)))


def _own(program: Program) -> set[int]:
    return {*program.graph.arriving} - {value for _, value in program.gradients}


def with_own_tangents(program: Program) -> Program:
    """``program`` as the owner of arriving gradients. Unchanged if they are very small, or if it communicates with
    other ranks, on which somebody may hold them."""
    graph, own = program.graph, _own(program)
    if not own or any(op.collective for op in graph.ops):
        return program
    peak_bytes = simulate(graph, byte_costs(program), keep_all_schedule(graph)).peak_bytes
    if tangent_bytes(program) < _LEAST_SHARE * peak_bytes:
        return program
    outputs = tuple(value for value in graph.outputs if value not in own)
    return with_overwrites(dataclasses.replace(program, graph=dataclasses.replace(graph, outputs=outputs)))

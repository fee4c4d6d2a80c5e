"""Who owns the gradients that arrive for a program's results.

As a program is captured its caller may hold them, as ``result.backward(gradient)`` does, so they count to its end. Those of a
loss are nobody else's: the autograd engine hands them over. A program that owns them frees each after the last operator that
reads it, as eager does, and may write over it.
"""

from __future__ import annotations

import dataclasses

from lowtide.ir import Graph, keep_all_schedule, simulate
from lowtide.program.overwrites import with_overwrites
from lowtide.program.program import Program
from lowtide.program.sizes import byte_costs

_LEAST_SHARE = 0.01  # of the peak, for them to be owned


def owns_tangents(graph: Graph) -> bool:
    """Whether the program owns gradients that arrive."""
    return not {*graph.arriving} <= {*graph.outputs}


def tangent_bytes(program: Program) -> int:
    """Of the gradients that arrive and are not gradients of the inputs themselves."""
    costs = byte_costs(program)
    return sum(int(costs.storage_bytes[storage]) for storage in program.graph.storages_of(_own(program)))


def _own(program: Program) -> set[int]:
    return {*program.graph.arriving} - {value for _, value in program.gradients}


def with_own_tangents(program: Program) -> Program:
    """``program`` as the owner of the gradients that arrive; as it is where they are hardly anything, and where it communicates
    with other ranks, on which somebody may hold them."""
    graph, own = program.graph, _own(program)
    if not own or any(op.collective for op in graph.ops):
        return program
    peak_bytes = simulate(graph, byte_costs(program), keep_all_schedule(graph)).peak_bytes
    if tangent_bytes(program) < _LEAST_SHARE * peak_bytes:
        return program
    outputs = tuple(value for value in graph.outputs if value not in own)
    return with_overwrites(dataclasses.replace(program, graph=dataclasses.replace(graph, outputs=outputs)))

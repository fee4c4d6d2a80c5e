"""Memory and time of a pass beside its operators: generator states, room between the passes, transfers of optimizer
states."""

from __future__ import annotations

import dataclasses

import numpy as np

from lowtide.ir import Costs
from lowtide.ir.graph import FETCH_STATE_TARGET, STATE_TARGETS, TANGENT_TARGET
from lowtide.program import Program

_RNG_STATE_BYTES = 5056  # allocated briefly by torch to read a CPU generator's state


def with_generator_states(program: Program, costs: Costs) -> Costs:
    """Add the memory needed briefly to read a CPU generator's state, before a random operator allocates its own."""
    workspace = np.array(costs.workspace_bytes)
    for op in program.graph.ops:
        if op.random:
            own = sum(int(costs.storage_bytes[s]) for s in {program.graph.values[v].storage for v in op.outputs})
            workspace[op.id] = max(int(workspace[op.id]), _RNG_STATE_BYTES - own)
    return dataclasses.replace(costs, workspace_bytes=workspace, rng_state_bytes=0)


def with_room_between(program: Program, costs: Costs, nbytes: int) -> Costs:
    """Add ``nbytes`` to the op of the first arriving gradient, so that this much is free at the end of the forward
    pass."""
    arrival = next((op.id for op in program.graph.ops if op.target == TANGENT_TARGET), None)
    if nbytes <= 0 or arrival is None:
        return costs
    workspace = np.array(costs.workspace_bytes)
    workspace[arrival] += nbytes
    return dataclasses.replace(costs, workspace_bytes=workspace)


def with_state_transfers(program: Program, costs: Costs) -> Costs:
    """Set the times for fetching and storing optimizer states, and for storing gradients, from the second memory of
    ``costs``."""
    graph, memory = program.graph, costs.second_memory
    moving = [op for op in graph.ops if op.target in STATE_TARGETS]
    if memory is None or not moving:
        return costs
    times = np.array(costs.time_ns)
    for op in moving:
        fetched = op.target == FETCH_STATE_TARGET
        size = int(costs.storage_bytes[graph.values[(op.outputs if fetched else op.inputs)[0]].storage])
        times[op.id] = memory.fetch_ns(size) if fetched else memory.offload_ns(size)
    return dataclasses.replace(costs, time_ns=times, collectives_beside=True)

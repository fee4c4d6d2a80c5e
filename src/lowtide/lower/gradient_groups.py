"""Decides when each gradient leaves the backward program.

A gradient is final after the last step that reads its storage, and leaves after the last that reads its parameter, which an
optimizer may then change. Gradients leave in groups, so that autograd can accumulate them (and optimizers, hooks and reducers
act on them) while the backward program is still running; a group is large enough that leaving and coming back costs little
beside the work in between. Before the steps at which memory is scarcest smaller groups leave too, so that none waits there.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir import Compute, Fetch, Free, Offload, Schedule, simulate
from lowtide.program.program import Program
from lowtide.program.sizes import byte_costs

_MOST_GROUPS = 16
_MOST_EARLY_GROUPS = 64
_LEAST_BYTES = 1 << 18  # of a group, since leaving and coming back takes the time of several small operators
_NEAR_PEAK = 0.97  # of the peak: steps where gradients should not wait


@dataclass(frozen=True, slots=True)
class GradientGroup:
    """Gradients (indices into the program's list) that leave after schedule step ``after``."""

    after: int
    gradients: tuple[int, ...]


def _final_steps(program: Program, schedule: Schedule) -> list[int]:
    """Return, for each gradient, the last step that computes or moves it, or touches its storage or its input's storage; a
    gradient that leaves in terms keeps the terms in order."""
    graph = program.graph
    last: dict[int, int] = {}
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            for value in (*op.inputs, *op.outputs):
                last[graph.values[value].storage] = index
        elif isinstance(step, (Offload, Fetch)):
            last[step.storage] = index
    final = []
    terms: dict[int, int] = {}
    for position, value in program.gradients:
        owner = program.inputs[position]
        read = -1 if owner is None else last.get(graph.values[owner].storage, -1)
        terms[position] = max(last[graph.values[value].storage], read, terms.get(position, -1))
        final.append(terms[position])
    return final


def _after_frees(schedule: Schedule, index: int) -> int:
    """Return the last of the ``Free`` steps directly after step ``index``, so that memory is freed before yielding."""
    while index + 1 < len(schedule.steps) and isinstance(schedule.steps[index + 1], Free):
        index += 1
    return index


def group_gradients(program: Program, schedule: Schedule) -> tuple[GradientGroup, ...]:
    """Group the program's gradients in the order in which they become final."""
    steps = _final_steps(program, schedule)
    sizes = [program.metas[value].storage_bytes for _, value in program.gradients]
    costs = byte_costs(program)  # without workspaces
    levels = simulate(program.graph, costs, schedule).timeline.tolist()
    threshold = max(_LEAST_BYTES, sum(sizes) // _MOST_GROUPS)
    least = max(_LEAST_BYTES // 4, sum(sizes) // _MOST_EARLY_GROUPS)
    near = _NEAR_PEAK * max(levels, default=0)
    found: list[GradientGroup] = []
    pending: list[int] = []
    pending_bytes = 0
    order = sorted(range(len(sizes)), key=lambda i: (steps[i], i))
    for rank, index in enumerate(order):
        pending.append(index)
        pending_bytes += sizes[index]
        last = rank + 1 == len(order)
        following = steps[index] if last else steps[order[rank + 1]]
        scarce = pending_bytes >= least and max(levels[steps[index] + 1 : following + 1], default=0) > near
        if last or ((pending_bytes >= threshold or scarce) and following != steps[index]):
            found.append(GradientGroup(_after_frees(schedule, steps[index]), tuple(pending)))
            pending, pending_bytes = [], 0
    if (program.updated or program.reduced) and (not found or found[-1].after + 1 < len(schedule.steps)):
        found.append(GradientGroup(len(schedule.steps) - 1, ()))  # for updates and reductions after the last of them
    return tuple(found)

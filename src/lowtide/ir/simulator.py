"""Reference semantics of a schedule: bytes and time, step by step, in exact integers.

- ``Compute(op)`` allocates every storage whose base is the op. While it runs, what is live, its new storages and its
  workspace are resident. Storages of the op that are still live stay as they are; their second copy lives during the
  step only.
- ``Compute(op, into)`` allocates nothing: the storage ``into``, of the same size, becomes the op's.
- ``Free(storage)`` releases after the step, nothing where the storage has become another's.
- ``SaveRng(op)`` holds ``rng_state_bytes`` until after the last ``Compute`` of the op.

Linear in the number of steps. Validity is the checker's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Compute, Free, SaveRng, Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """``timeline[i]``: bytes resident during step i, workspace included; ``peak_step`` is the first step at the peak."""

    peak_bytes: int
    time_ns: int
    peak_step: int
    timeline: npt.NDArray[np.int64]
    live_at_peak: tuple[int, ...]
    final_bytes: int


def simulate(graph: Graph, costs: Costs, schedule: Schedule) -> Simulation:
    """Run ``schedule`` on byte counts."""
    sizes = costs.storage_bytes.tolist()
    workspace = costs.workspace_bytes.tolist()
    times = costs.time_ns.tolist()
    owned = owned_storages(graph)
    last_compute = {step.op: i for i, step in enumerate(schedule.steps) if isinstance(step, Compute)}
    live: set[int] = set()
    saved: set[int] = set()
    taken: set[int] = set()
    resident, time_ns, timeline = graph.fixed_bytes, 0, []
    for index, step in enumerate(schedule.steps):
        during = resident
        if isinstance(step, Compute):
            own = owned[step.op]
            if step.into is not None:
                taken.add(step.into)
                resident -= sizes[step.into]
            during = resident + workspace[step.op] + sum(sizes[s] for s in own)
            fresh = [s for s in own if s not in live]
            live.update(fresh)
            resident += sum(sizes[s] for s in fresh)
            time_ns += times[step.op]
            if step.op in saved and last_compute[step.op] == index:
                saved.discard(step.op)
                resident -= costs.rng_state_bytes
        elif isinstance(step, Free):
            live.discard(step.storage)
            resident -= 0 if step.storage in taken else sizes[step.storage]
            taken.discard(step.storage)
        elif isinstance(step, SaveRng):
            saved.add(step.op)
            resident += costs.rng_state_bytes
            during = resident
        timeline.append(during)
    line = np.asarray(timeline, dtype=np.int64)
    peak_step = int(line.argmax()) if len(line) else 0
    peak = max(int(line.max()) if len(line) else 0, graph.fixed_bytes)
    return Simulation(peak, time_ns, peak_step, line, _live_at(schedule, owned, peak_step), resident)


def owned_storages(graph: Graph) -> list[list[int]]:
    """Per op, the storages that it allocates."""
    owned: list[list[int]] = [[] for _ in graph.ops]
    for storage in graph.storages:
        if storage.base is not None:
            owned[storage.base].append(storage.id)
    return owned


def _live_at(schedule: Schedule, owned: list[list[int]], index: int) -> tuple[int, ...]:
    """Storages resident during step ``index``."""
    live: set[int] = set()
    for step in schedule.steps[:index]:
        if isinstance(step, Compute):
            live.update(owned[step.op])
        elif isinstance(step, Free):
            live.discard(step.storage)
    if index < len(schedule.steps) and isinstance(step := schedule.steps[index], Compute):
        live.update(owned[step.op])
        live.discard(-1 if step.into is None else step.into)
    return tuple(sorted(live))

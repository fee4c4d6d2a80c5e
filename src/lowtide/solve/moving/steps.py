"""Schedules and programs as flat arrays for the compiled kernels. These run schedules on the clock of
``lowtide.ir.transfers``, count bytes as ``lowtide.ir.simulator`` does, and place what runs beside computing.

A step is a row of three numbers: what it does, its operator or storage, and the storage that a compute overwrites or
-1. A transfer that takes longer than 19 hours counts as that long, so that sums stay within 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Offload,
    RestoreRng,
    SaveRng,
    Schedule,
    SecondMemory,
    Step,
    may_run_early,
)
from lowtide.ir.graph import OPTIMIZER_TARGET, TANGENT_TARGET
from lowtide.native import core
from lowtide.solve.model.compact import Flags, Indices, Numbers
from lowtide.solve.model.ragged import ragged
from lowtide.solve.model.split import MOST_NS

_KINDS: tuple[type[Step], ...] = (Compute, Free, SaveRng, RestoreRng, Offload, Fetch)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
FREE, FETCH = _NUMBER_OF[Free], _NUMBER_OF[Fetch]
STATES = (_NUMBER_OF[SaveRng], _NUMBER_OF[RestoreRng])


class Program(NamedTuple):
    """A graph with its costs. ``beside``: collectives that run beside computing. ``changes``: effects. ``holds``:
    effects that collectives must not pass on their first run. ``early``: operators that need nothing of the program.
    ``again``: operators that may run again anywhere. Ragged tables by op: the storages that it ``owned``, ``read``
    and so on as in ``Graph``, and its values; ``values``: those of a storage."""

    fixed_bytes: int
    rng_state_bytes: int
    shared: bool
    time_ns: Numbers
    workspace_bytes: Numbers
    storage_bytes: Numbers
    offload_ns: Numbers
    fetch_ns: Numbers
    beside: Flags
    changes: Flags
    holds: Flags
    early: Flags
    again: Flags
    handed: Indices
    owned_start: Indices
    owned: Indices
    read_start: Indices
    read: Indices
    changed_start: Indices
    changed: Indices
    touched_start: Indices
    touched: Indices
    written_start: Indices
    written: Indices
    inputs_start: Indices
    inputs: Indices
    outputs_start: Indices
    outputs: Indices
    values_start: Indices
    values: Indices


class Steps(NamedTuple):
    rows: Indices
    boundary: int

    @property
    def fetched(self) -> list[int]:
        """The storages that come back from the second memory."""
        found: list[int] = np.unique(self.rows[self.rows[:, 0] == FETCH, 1]).tolist()
        return found


class Run(NamedTuple):
    """The time and memory of a schedule."""

    time_ns: int
    wait_ns: int
    peak_bytes: int
    second_peak_bytes: int


def program_of(graph: Graph, costs: Costs) -> Program:
    """The arrays of a graph, in time linear in its size."""
    memory = costs.second_memory
    sizes = costs.storage_bytes.tolist()
    tables: dict[str, Sequence[Sequence[int]]] = {
        "owned": graph.owned, "read": graph.read, "changed": graph.changed, "touched": graph.touched, "written": graph.written,
        "inputs": [op.inputs for op in graph.ops], "outputs": [op.outputs for op in graph.ops],
        "values": [storage.values for storage in graph.storages],
    }  # fmt: skip
    columns = {}
    for name, rows in tables.items():
        columns[f"{name}_start"], columns[name] = ragged(rows)
    return Program(
        fixed_bytes=graph.fixed_bytes,
        rng_state_bytes=costs.rng_state_bytes,
        shared=memory is not None and memory.shared,
        time_ns=costs.time_ns,
        workspace_bytes=costs.workspace_bytes,
        storage_bytes=costs.storage_bytes,
        offload_ns=_transfers(memory, sizes, back=False),
        fetch_ns=_transfers(memory, sizes, back=True),
        beside=_flags(op.collective and costs.collectives_beside for op in graph.ops),
        changes=_flags(op.effect for op in graph.ops),
        holds=_flags(op.effect and op.target not in (TANGENT_TARGET, OPTIMIZER_TARGET) for op in graph.ops),
        early=_flags(may_run_early(graph, op) for op in graph.ops),
        again=_flags(op.recomputable and not op.random for op in graph.ops),
        handed=np.array(graph.storages_of(graph.forward_outputs), np.int32),
        **columns,
    )


def _flags(values: Iterable[bool]) -> Flags:
    return np.array([*values], np.bool_)


def _transfers(memory: SecondMemory | None, sizes: Sequence[int], *, back: bool) -> Numbers:
    """Nanoseconds by storage; without a second memory nothing moves."""
    if memory is None:
        return np.zeros(len(sizes), np.int64)
    takes = memory.fetch_ns if back else memory.offload_ns
    known = {size: min(takes(size), MOST_NS) for size in {*sizes}}
    return np.array([known[size] for size in sizes], np.int64)


def encoded(schedule: Schedule) -> Steps:
    """``schedule`` as rows."""
    numbers: list[int] = []
    for step in schedule.steps:
        if isinstance(step, Compute):
            numbers += (0, step.op, -1 if step.into is None else step.into)
        elif isinstance(step, (SaveRng, RestoreRng)):
            numbers += (_NUMBER_OF[type(step)], step.op, -1)
        else:
            numbers += (_NUMBER_OF[type(step)], step.storage, -1)
    return Steps(np.array(numbers, np.int32).reshape(-1, 3), schedule.boundary)


def decoded(steps: Steps) -> Schedule:
    """The schedule of the rows."""
    made: dict[tuple[int, ...], Step] = {}
    rows = [*map(tuple, steps.rows.tolist())]
    for kind, of, into in {*rows}:
        made[kind, of, into] = Compute(of, into) if kind == 0 and into >= 0 else _KINDS[kind](of)
    return Schedule(tuple(made[row] for row in rows), steps.boundary)


def run_steps(program: Program, steps: Steps) -> Run:
    return Run(*core.run_steps(program, steps))


def place_steps(program: Program, steps: Steps, budget_bytes: int) -> tuple[Steps, Run]:
    """``place_transfers`` on rows; ``native/placing.hpp`` says how."""
    rows, boundary, run = core.place_steps(program, steps, budget_bytes)
    return Steps(rows, boundary), Run(*run)


def place_transfers(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with its transfers, and collectives that run beside computing, where they are waited for least, and
    without useless transfers. They begin as late as they can, and what they need is freed as soon as it can be; then
    they get the room that the budget leaves. A peak within the budget stays within it."""
    if not (schedule.moves or costs.collectives_beside):
        return schedule
    return decoded(place_steps(program_of(graph, costs), encoded(schedule), budget_bytes)[0])

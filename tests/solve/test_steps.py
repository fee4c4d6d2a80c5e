"""The compiled clock and bytes are those of ``lowtide.ir``, to the nanosecond and to the byte."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lowtide.ir import Costs, Graph, Schedule, SecondMemory, simulate
from lowtide.native import core
from lowtide.solve.moving.steps import decoded, encoded, program_of, run_steps
from tests.ir.test_beside import _drawn, _schedules
from tests.solve.test_moving import _case
from tests.support.wide import seeds


def _agree(graph: Graph, costs: Costs, schedule: Schedule) -> None:
    program, steps = program_of(graph, costs), encoded(schedule)
    assert decoded(steps) == schedule
    run, wanted = run_steps(program, steps), simulate(graph, costs, schedule)
    assert core.starts_of(program, steps).tolist() == [*wanted.timing.start_ns, wanted.time_ns]
    assert core.resident_bytes(program, steps).tolist() == [*wanted.timeline.tolist(), wanted.final_bytes]
    assert run.time_ns == wanted.time_ns
    assert run.wait_ns == wanted.timing.wait_ns
    assert run.peak_bytes == wanted.peak_bytes
    assert run.second_peak_bytes == wanted.timing.second_peak_bytes


@pytest.mark.parametrize("seed", seeds(60, 300))
def test_with_transfers(seed: int) -> None:
    draw, graph, costs, parts, found = _case(seed)
    schedule = parts.schedule(found)
    _agree(graph, costs, schedule)
    program, budget = program_of(graph, costs), simulate(graph, costs, schedule).peak_bytes + draw.randint(0, 30)
    rows, boundary, run = core.place_steps(program, encoded(schedule), budget)
    placed = decoded(encoded(schedule)._replace(rows=rows, boundary=boundary))
    _agree(graph, costs, placed)
    assert run == run_steps(program, encoded(placed))


@pytest.mark.parametrize("seed", seeds(60, 300))
def test_with_collectives_beside_computing(seed: int) -> None:
    graph, costs = _drawn(seed)
    for schedule, beside in itertools.product(_schedules(graph, costs, seed), (True, False)):
        _agree(graph, replace(costs, collectives_beside=beside), schedule)


def test_transfers_of_more_than_19_hours_count_as_that_long() -> None:
    _, graph, costs, _, _ = _case(0)
    program = program_of(
        graph, replace(costs, storage_bytes=costs.storage_bytes * 10**12, second_memory=SecondMemory(1, 1))
    )
    assert 0 < program.offload_ns.max() == program.fetch_ns.max() == 2**46

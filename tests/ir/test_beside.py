"""Collectives beside computing: when each of them runs, who waits, what is exposed, and what stays resident meanwhile."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from lowtide.errors import PlanError
from lowtide.ir import (
    Compute,
    Costs,
    Free,
    Graph,
    Kind,
    Schedule,
    Step,
    awaited,
    check,
    format_graph,
    graph_from_json,
    graph_to_json,
    keep_all_schedule,
    schedule_from_sequence,
    simulate,
)
from lowtide.solve.moving.steps import place_transfers
from tests.ir.lanes import run_tasks, tasks_of
from tests.solve.brute_force_moves import memory_like
from tests.solve.small_graphs import chain
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.sequences import random_sequence
from tests.support.text_forms import parse_graph


def _problem(collectives: set[int], times: tuple[int, ...]) -> tuple[Graph, Costs]:
    """op1 and op2 read op0, op3 both of them, op4 and op5 go on from there."""
    graph, costs = chain(3, times=times)
    inputs = {1: (0,), 2: (0,), 3: (1, 2), 4: (3,), 5: (4, 0)}
    ops = (replace(op, inputs=inputs.get(op.id, ()), collective=op.id in collectives) for op in graph.ops)
    return replace(graph, ops=tuple(ops)), replace(costs, collectives_beside=True)


def test_computing_goes_on_until_the_result_is_read() -> None:
    graph, costs = _problem({1}, (5, 20, 7, 5, 5, 5))
    run = simulate(graph, costs, keep_all_schedule(graph))
    # op0 until 5, op1 beside from 5 to 25, op2 until 12, op3 from 25
    (one,) = run.timing.collectives
    assert (one.of, one.start_ns, one.end_ns, one.bytes) == (1, 5, 25, 4)
    assert run.time_ns == 40
    assert (run.timing.wait_ns, run.timing.collective_ns, run.timing.exposed_ns) == (13, 20, 13)
    in_line = simulate(graph, replace(costs, collectives_beside=False), keep_all_schedule(graph))
    assert (in_line.time_ns, in_line.timing.collectives) == (47, ())


def test_collectives_wait_for_each_other_and_the_end_for_all() -> None:
    graph, costs = _problem({1, 2, 5}, (5, 20, 7, 5, 5, 9))
    run = simulate(graph, costs, keep_all_schedule(graph))
    assert [(one.of, one.start_ns, one.end_ns) for one in run.timing.collectives] == [
        (1, 5, 25),
        (2, 25, 32),
        (5, 42, 51),
    ]
    assert run.time_ns == 51
    assert run.timing.exposed_ns == 36


def test_a_free_waits_for_whoever_reads_but_not_for_what_was_written_over() -> None:
    graph, costs = _problem({1}, (5, 20, 7, 5, 5, 5))
    early = Schedule((Compute(0), Compute(1), Free(0), Compute(2)), 4)
    assert simulate(graph, costs, early).timing.start_ns == (0, 5, 25, 25)
    over = Schedule((Compute(0), Compute(1, 0), Free(0), Compute(2)), 4)
    assert simulate(graph, costs, over).timing.start_ns == (0, 5, 5, 5)


def test_an_effect_waits_until_what_it_changes_is_no_longer_read() -> None:
    graph, costs = _problem({1}, (5, 20, 7, 5, 5, 5))
    graph = replace(graph, ops=tuple(replace(op, effect=op.id == 2) for op in graph.ops))
    assert simulate(graph, costs, keep_all_schedule(graph)).timing.start_ns[:3] == (0, 5, 25)


def test_the_boundary_waits_for_what_is_handed_over() -> None:
    graph, costs = _problem({2}, (5, 3, 50, 5, 5, 5))
    graph = replace(graph, forward_outputs=(2,), ops=tuple(replace(op, inputs=()) for op in graph.ops))
    schedule = Schedule(tuple(map(Compute, range(6))), 3)
    assert simulate(graph, costs, schedule).timing.start_ns == (0, 5, 8, 58, 63, 68)
    graph = replace(graph, forward_outputs=())
    assert simulate(graph, costs, schedule).timing.start_ns == (0, 5, 8, 8, 13, 18)


def test_workspace_stays_until_the_collective_has_certainly_ended() -> None:
    graph, costs = _problem({1}, (5, 20, 7, 5, 5, 5))
    costs = replace(costs, workspace_bytes=np.array([0, 9, 0, 0, 0, 0]))
    steps: tuple[Step, ...] = tuple(map(Compute, range(6)))
    run = simulate(graph, costs, Schedule(steps, 3))
    assert awaited(graph, Schedule(steps, 3)) == {1: 3}
    assert [(one.first, one.last) for one in run.allocations if one.kind is Kind.WORKSPACE] == [(1, 2)]
    assert run.timeline.tolist() == [4, 17, 21, 16, 20, 24]


def _drawn(seed: int) -> tuple[Graph, Costs]:
    draw = random.Random(seed)
    graph, costs = overwriting(*random_graph(seed, 5 + seed % 25), seed)
    ops = tuple(replace(op, collective=draw.random() < 0.4) for op in graph.ops)
    memory = memory_like(costs, draw.choice((30, 100)), latency_ns=draw.random() < 0.5, shared=draw.random() < 0.3)
    return replace(graph, ops=ops), replace(costs, second_memory=memory, collectives_beside=True)


def _schedules(graph: Graph, costs: Costs, seed: int) -> list[Schedule]:
    """Without transfers, and with some, where something may move."""
    found = [keep_all_schedule(graph), schedule_from_sequence(graph, random_sequence(graph, seed))]
    from lowtide.solve.model.split import movable_storages, split

    prices = dict.fromkeys(movable_storages(graph, costs), 1)
    if prices:
        parts = split(graph, costs, prices)
        sequence = schedule_from_sequence(parts.graph, random_sequence(parts.graph, seed))
        found.append(parts.schedule(sequence))
        found.append(place_transfers(graph, costs, found[-1], simulate(graph, costs, found[-1]).peak_bytes))
    return found


@pytest.mark.parametrize("seed", range(120))
def test_the_clock_agrees_with_a_simulation_of_pairs(seed: int) -> None:
    graph, costs = _drawn(seed)
    assert costs.second_memory is not None
    for schedule, beside in itertools.product(_schedules(graph, costs, seed), (True, False)):
        check(graph, schedule)
        run = simulate(graph, replace(costs, collectives_beside=beside), schedule)
        tasks = tasks_of(graph, replace(costs, collectives_beside=beside), schedule)
        assert run.time_ns == run_tasks(tasks, costs.second_memory.shared)
        steps = [*tasks]
        del steps[schedule.boundary]
        assert list(run.timing.start_ns) == [task.asked for task in steps]
        lane = [(task.begin, task.end) for task in steps if task.lane == "collective"]
        assert [(one.start_ns, one.end_ns) for one in run.timing.collectives] == lane
        computed = {at for task in steps if not task.lane for at in range(task.begin, task.end)}
        exposed = sum(at not in computed for begin, end in lane for at in range(begin, end))
        assert run.timing.exposed_ns == exposed
        assert run.timing.wait_ns == run.time_ns - len(computed)


@pytest.mark.parametrize("seed", range(60))
def test_beside_is_never_slower_and_never_below_either_sum(seed: int) -> None:
    graph, costs = _drawn(seed)
    schedule = schedule_from_sequence(graph, random_sequence(graph, seed))
    in_line = simulate(graph, replace(costs, collectives_beside=False), schedule)
    run = simulate(graph, costs, schedule)
    lane = run.timing.collective_ns
    assert max(lane, in_line.time_ns - lane) <= run.time_ns <= in_line.time_ns
    assert run.peak_bytes >= in_line.peak_bytes


@pytest.mark.parametrize("seed", range(60))
def test_workspace_is_held_while_its_collective_runs(seed: int) -> None:
    """Whatever times are: what computing waits for at the end of the workspace's life has ended then."""
    graph, costs = _drawn(seed)
    draw = random.Random(seed)
    schedule = schedule_from_sequence(graph, random_sequence(graph, seed))
    for _ in range(3):
        costs = replace(costs, time_ns=np.array([draw.randint(0, 30) for _ in graph.ops]))
        tasks = tasks_of(graph, costs, schedule)
        run_tasks(tasks)
        del tasks[schedule.boundary]
        for first, end in awaited(graph, schedule).items():
            assert end == len(tasks) or tasks[first].end <= tasks[end].begin


def test_forms_say_whether_collectives_run_beside() -> None:
    graph, costs = _problem({1}, (5, 20, 7, 5, 5, 5))
    data = json.loads(json.dumps(graph_to_json(graph, costs)))
    assert data["format"] == "lowtide-graph/2"
    for again in (graph_from_json(data), parse_graph(format_graph(graph, costs))):
        assert again[0] == graph
        assert again[1] is not None
        assert again[1].collectives_beside
    in_line = parse_graph(format_graph(graph, replace(costs, collectives_beside=False)))[1]
    assert in_line is not None
    assert not in_line.collectives_beside
    with pytest.raises(PlanError, match="collectives_beside is 1, not true or false"):
        graph_from_json({**data, "collectives_beside": 1})

"""Transfers: what a schedule with them takes and needs, which of them are refused, and the forms that they are written in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import PlanError, ScheduleError
from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Lane,
    Offload,
    Schedule,
    SecondMemory,
    Step,
    check,
    format_graph,
    format_schedule,
    graph_from_json,
    graph_to_json,
    load_instance,
    schedule_from_json,
    schedule_to_json,
    simulate,
)
from tests.solve.small_graphs import chain
from tests.support.text_forms import parse_graph, parse_schedule

_SLOW = SecondMemory(500_000_000, 250_000_000, latency_ns=3)  # 4 bytes: 11 ns there, 19 ns back
_STEPS: tuple[Step, ...] = (
    Compute(0), Offload(0), Compute(1), Free(0), Compute(2), Free(1), Fetch(0), Compute(3), Free(2), Compute(1), Compute(4),
    Free(3), Free(1), Compute(5), Free(0), Free(4),
)  # fmt: skip


def _problem(memory: SecondMemory = _SLOW, *times: int) -> tuple[Graph, Costs]:
    graph, costs = chain(3, times=times or (5, 5, 5, 5, 5, 5))
    # op3 reads v2 and v1 in ``chain``: here all of the backward pass runs on v0 and what is computed from it
    inputs = {1: (0,), 2: (1,), 3: (2,), 4: (3, 1), 5: (4, 0)}
    ops = tuple(replace(op, inputs=inputs.get(op.id, ())) for op in graph.ops)
    return replace(graph, ops=ops), replace(costs, second_memory=memory)


def test_whoever_needs_what_is_under_way_waits() -> None:
    graph, costs = _problem()
    schedule = Schedule(_STEPS, 6)
    check(graph, schedule)
    run = simulate(graph, costs, schedule)
    # op0 until 5, its copy until 16; op1 until 10; the free waits until 16; op2 until 21, the fetch until 40; op3 until 26;
    # op1 again reads v0 and waits until 40.
    assert [(t.of, t.lane is Lane.FETCH, t.start_ns, t.end_ns) for t in run.timing.transfers] == [
        (0, False, 5, 16),
        (0, True, 21, 40),
    ]
    assert run.timing.start_ns[3:5] == (16, 16)
    assert run.timing.start_ns[9] == 40
    assert (run.time_ns, run.timing.wait_ns) == (55, 55 - 7 * 5)
    assert run.peak_bytes == 16
    assert run.timing.second_peak_bytes == 4


def test_transfers_of_one_direction_wait_for_each_other_and_those_of_a_disk_all() -> None:
    steps: tuple[Step, ...] = (
        Compute(0), Offload(0), Compute(1), Offload(1), Compute(2), Free(0), Fetch(0), Free(1), Compute(3), Fetch(1),
        Compute(4), Compute(5),
    )  # fmt: skip
    for shared, starts in ((False, [5, 16, 16, 35]), (True, [5, 16, 27, 46])):
        graph, costs = _problem(replace(_SLOW, shared=shared))
        check(graph, Schedule(steps, 7))
        run = simulate(graph, costs, Schedule(steps, 7))
        assert [transfer.start_ns for transfer in run.timing.transfers] == starts


def test_a_transfer_that_nobody_waits_for_ends_the_step() -> None:
    graph, costs = _problem()
    steps: tuple[Step, ...] = (*map(Compute, range(5)), Offload(4), Free(4), Fetch(4), Compute(5))
    run = simulate(graph, costs, Schedule(steps, 3))
    assert run.time_ns == 25 + 11 + 19 + 5


def test_a_view_waits_for_no_copy_of_what_it_looks_at() -> None:
    """Another operator that puts its result there writes into it."""
    graph, costs = _problem()
    ops = [replace(op, inputs=(0,) if op.id == 1 else op.inputs) for op in graph.ops]
    values = [replace(value, storage=0) if value.id == 1 else value for value in graph.values]
    storages = (replace(graph.storages[0], values=(0, 1)), replace(graph.storages[1], base=None, values=()))
    steps = (Compute(0), Offload(0), Compute(1), Compute(2))
    for once, begins in ((False, 5), (True, 16)):
        ops[1] = replace(ops[1], once=once)
        looking = replace(graph, ops=tuple(ops), values=tuple(values), storages=(*storages, *graph.storages[2:]))
        assert looking.views[1] is not once
        assert simulate(looking, costs, Schedule(steps, 4)).timing.start_ns[2] == begins


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Offload(0), Compute(0)), "step 0: the storage of v0 is to be offloaded but not live"),
        ((Compute(0), Offload(0), Offload(0)), "step 2: the storage of v0 was offloaded before"),
        ((Compute(0), Fetch(0)), "step 1: the storage of v0 is to be fetched but was not offloaded"),
        ((Compute(0), Offload(0), Fetch(0)), "step 2: the storage of v0 is to be fetched but still live"),
        ((Compute(0), Offload(0), Free(0), Compute(1)), "step 3: op1 reads v0, which is not live"),
        ((Compute(0), Offload(7)), "step 1: there is no storage 7"),
        ((*map(Compute, range(3)), Offload(0), *map(Compute, range(3, 6))), "is offloaded and never fetched"),
    ],
)
def test_transfers_that_cannot_be(steps: tuple[Step, ...], message: str) -> None:
    graph, _ = _problem()
    with pytest.raises(ScheduleError, match=message):
        check(graph, Schedule(steps, min(4, len(steps))))


def test_what_is_handed_over_does_not_move() -> None:
    graph, _ = _problem()
    graph = replace(graph, forward_outputs=(2,))
    steps: tuple[Step, ...] = (*map(Compute, range(3)), Offload(2), Free(2), Fetch(2), *map(Compute, range(3, 6)))
    with pytest.raises(ScheduleError, match="step 3: the storage of v2 is not the program's to move"):
        check(graph, Schedule(steps, 3))


def test_no_transfers_without_a_second_memory() -> None:
    graph, costs = _problem()
    with pytest.raises(PlanError, match="no second memory"):
        assert simulate(graph, replace(costs, second_memory=None), Schedule(_STEPS, 6)).time_ns


def test_forms(tmp_path: Path) -> None:
    schedule = Schedule(_STEPS, 6)
    for memory in (_SLOW, SecondMemory(1, 2, 3, 4, shared=True)):
        graph, costs = _problem(memory)
        data = json.loads(json.dumps(graph_to_json(graph, costs)))
        assert data["format"] == "lowtide-graph/2"
        for again in (graph_from_json(data), parse_graph(format_graph(graph, costs))):
            assert again[0] == graph
            assert again[1] is not None
            assert again[1].second_memory == memory
    written = json.loads(json.dumps(schedule_to_json(schedule)))
    assert written["format"] == "lowtide-schedule/2"
    assert ["offload", 0] in written["steps"]
    assert schedule_from_json(written) == schedule == parse_schedule(format_schedule(schedule))
    file = tmp_path / "dag.json"
    dag = {
        "format": "lowtide-dag/2", "name": "x", "forward_ops": 1, "outputs": [0],
        "second_memory": {"offload_bytes_per_second": 16e9, "fetch_bytes_per_second": 8_000_000_000, "latency_ns": 10_000},
        "ops": [{"name": "a", "time_ns": 1, "bytes": 4, "inputs": []}],
    }  # fmt: skip
    file.write_text(json.dumps(dag))
    assert load_instance(file)[1].second_memory == SecondMemory(16_000_000_000, 8_000_000_000, 10_000)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"offload_bytes_per_second": 0, "fetch_bytes_per_second": 1}, "at least 1 byte per second"),
        ({"offload_bytes_per_second": 1}, "the second memory lacks fetch_bytes_per_second"),
        ({"offload_bytes_per_second": 1, "fetch_bytes_per_second": 1, "speed": 1}, "has the fields"),
        ({"offload_bytes_per_second": 1, "fetch_bytes_per_second": 1, "shared": 1}, "shared"),
        ({"offload_bytes_per_second": 1, "fetch_bytes_per_second": -1}, "fetch_bytes_per_second"),
        ([16], "has the fields"),
    ],
)
def test_bad_second_memories_say_what_is_wrong(memory: object, message: str) -> None:
    graph, costs = _problem()
    with pytest.raises(PlanError, match=message):
        graph_from_json({**graph_to_json(graph, costs), "second_memory": memory})


@pytest.mark.parametrize(("capacity", "held"), [(None, [0, 1, 2, 3]), (10, [0, 2]), (9, [0, 2]), (8, [0, 3]), (0, [])])
def test_a_second_memory_holds_what_it_has_room_for(capacity: int | None, held: list[int]) -> None:
    memory = SecondMemory(1, 1, capacity_bytes=capacity)
    assert memory.held([(0, 6), (1, 5), (2, 3), (3, 2)]) == held

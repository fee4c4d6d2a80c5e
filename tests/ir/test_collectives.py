"""Collectives: which of them may run again, how files say so, and in what order schedules run them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import PlanError, ScheduleError
from lowtide.ir import (
    Compute,
    Costs,
    Free,
    Graph,
    Schedule,
    check,
    collectives_of,
    format_graph,
    graph_from_json,
    graph_to_json,
    is_view,
    keep_all_schedule,
    load_instance,
    schedule_from_sequence,
)
from tests.solve.small_graphs import chain
from tests.support.text_forms import parse_graph

_AGAIN = [0, 1, 2, 1, 3, 4, 5]


def _with(flags: dict[int, dict[str, Any]]) -> tuple[Graph, Costs]:
    graph, costs = chain(3)
    return replace(graph, ops=tuple(replace(op, **flags.get(op.id, {})) for op in graph.ops)), costs


def test_a_collective_may_run_again_unless_it_is_once() -> None:
    gathering, _ = _with({1: {"collective": True}})
    schedule = schedule_from_sequence(gathering, _AGAIN)
    check(gathering, schedule)
    assert collectives_of(gathering, schedule) == [1, 1]
    assert collectives_of(gathering, keep_all_schedule(gathering)) == [1]
    only_once, _ = _with({1: {"collective": True, "once": True}})
    with pytest.raises(ScheduleError, match="op1 must run exactly once"):
        check(only_once, schedule)


def test_the_sequence_of_collectives_is_that_of_the_steps() -> None:
    graph, _ = _with({op: {"collective": True} for op in (0, 1, 4)})
    schedule = Schedule((*map(Compute, (0, 1, 2, 3)), Free(0), Compute(1), Compute(4), Compute(0), Compute(5)), 3)
    assert collectives_of(graph, schedule) == [0, 1, 1, 4, 0]


def test_a_collective_that_may_run_again_is_no_view() -> None:
    """What returns its input is free to run anywhere; what communicates is not."""
    graph, _ = _with({1: {"collective": True}})
    values = tuple(replace(value, storage=0) if value.id == 1 else value for value in graph.values)
    storages = tuple(replace(s, values=(0, 1) if s.id == 0 else s.values) for s in graph.storages)
    graph = replace(graph, values=values, storages=storages)
    assert not is_view(graph, graph.ops[1])
    late = Schedule((Compute(0), Compute(2), Compute(1), Compute(3)), 3)
    with pytest.raises(ScheduleError, match="op1 first runs after op2"):
        check(replace(graph, ops=tuple(replace(op, inputs=()) for op in graph.ops)), late)


@pytest.mark.parametrize(
    ("flags", "version"),
    [
        ({"collective": True}, 2),
        ({"collective": True, "once": True}, 1),
        ({"collective": True, "effect": True}, 1),
        ({"once": True}, 1),
    ],
)
def test_forms_keep_what_may_run_again(flags: dict[str, bool], version: int) -> None:
    graph, costs = _with({1: flags})
    data = json.loads(json.dumps(graph_to_json(graph, costs)))
    assert data["format"] == f"lowtide-graph/{version}"
    assert graph_from_json(data)[0] == graph
    assert parse_graph(format_graph(graph, costs))[0] == graph


def test_in_version_1_no_collective_runs_again() -> None:
    graph, costs = _with({1: {"collective": True}})
    data = {**graph_to_json(graph, costs), "format": "lowtide-graph/1"}
    op = graph_from_json(data)[0].ops[1]
    assert (op.collective, op.once, op.recomputable) == (True, True, False)


def test_flags_of_plain_graphs(tmp_path: Path) -> None:
    file = tmp_path / "dag.json"
    dag = {
        "format": "lowtide-dag/2", "name": "x", "forward_ops": 1, "outputs": [1],
        "ops": [
            {"name": "gather", "time_ns": 1, "bytes": 4, "inputs": [], "flags": ["collective"]},
            {"name": "use", "time_ns": 1, "bytes": 4, "inputs": [0]},
            {"name": "reduce", "time_ns": 1, "bytes": 4, "inputs": [1], "flags": ["collective", "once"]},
        ],
    }  # fmt: skip
    file.write_text(json.dumps(dag))
    ops = load_instance(file)[0].ops
    assert [(op.collective, op.once, op.effect) for op in ops] == [
        (True, False, False),
        (False, False, False),
        (True, True, True),
    ]
    dag["ops"][0]["flags"] = ["quick"]  # type: ignore[index]
    file.write_text(json.dumps(dag))
    with pytest.raises(PlanError, match="op gather has unknown flags"):
        load_instance(file)

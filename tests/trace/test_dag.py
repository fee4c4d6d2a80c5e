"""Traces as plain DAGs and as graphs."""

from __future__ import annotations

from lowtide.ir import keep_all_schedule, simulate
from lowtide.ir.serial import dag_from_json, graph_from_json
from lowtide.solve import Problem, solve
from lowtide.trace import (
    Constant,
    Created,
    OperatorCall,
    Release,
    Trace,
    trace_to_dag,
    trace_to_graph,
    unconstrained_peak_bytes,
)
from tests.support.traces import random_trace


def test_aliases_results_and_constants() -> None:
    events = (
        Constant(0, 100),
        OperatorCall("mm", 5, (0,), (Created(1, 4), Created(2, 6)), workspace_bytes=3),
        OperatorCall("view", 1, (2,), (Created(3, 0, 2),)),
        OperatorCall("t", 1, (0,), (Created(4, 0, 0),)),
        OperatorCall("add", 7, (3, 4, 1), (Created(5, 8),)),
        Release(1),
        Release(2),
        Release(3),
    )
    assert trace_to_dag(Trace(events, "small", forward_calls=2)) == {
        "format": "lowtide-dag/1",
        "name": "small",
        "fixed_bytes": 100,
        "ops": [
            {"name": "mm_0", "time_ns": 5, "bytes": 10, "workspace_bytes": 3, "inputs": []},
            {"name": "add_1", "time_ns": 7, "bytes": 8, "workspace_bytes": 0, "inputs": [0]},
        ],
        "forward_ops": 1,
        "outputs": [1],
    }


def test_writes() -> None:
    """A write is a new version; one to a constant has no bytes, and later readers come after it."""
    events = (
        Constant(0, 100),
        OperatorCall("a", 1, (0,), (Created(1, 4),)),
        OperatorCall("view", 1, (1,), (Created(2, 0, 1),)),
        OperatorCall("relu_", 1, (1,), (), (1,)),
        OperatorCall("step_", 1, (0, 2), (), (0,)),
        OperatorCall("b", 1, (0,), (Created(3, 2),)),
    )
    dag = trace_to_dag(Trace(events))
    assert [(op["name"], op["bytes"], op["inputs"]) for op in dag["ops"]] == [
        ("a_0", 4, []),
        ("relu__1", 4, [0]),
        ("step__2", 0, [1]),
        ("b_3", 2, [2]),
    ]
    assert dag["outputs"] == [1, 2, 3]


def test_random_traces_can_be_planned() -> None:
    for seed in range(10):
        graph, costs = dag_from_json(trace_to_dag(random_trace(seed)))
        peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        assert solve(Problem(graph, costs, peak), "keep-all").status.solved


def test_graphs_have_every_result_and_view() -> None:
    """A storage per result, aliases as views, a new version per write; a write to a constant is an effect."""
    events = (
        Constant(0, 100),
        OperatorCall("mm", 5, (0,), (Created(1, 4), Created(2, 6)), workspace_bytes=3, random=True),
        OperatorCall("view", 1, (2,), (Created(3, 0, 2),)),
        OperatorCall("relu_", 2, (2,), (), (2,)),
        OperatorCall("step_", 1, (0, 1), (), (0,)),
        OperatorCall("draw", 1, (), (Created(4, 2),), once=True),
        OperatorCall("add", 7, (3, 4), (Created(5, 8),)),
    )
    graph, costs = graph_from_json(trace_to_graph(Trace(events, "small", forward_calls=2)))
    assert [(storage.base, int(costs.storage_bytes[storage.id])) for storage in graph.storages] == [
        (None, 100), (0, 4), (0, 6), (2, 6), (4, 2), (5, 8),
    ]  # fmt: skip
    assert [op.name for op in graph.ops if op.effect] == ["step__3", "draw_4"]
    assert [op.name for op in graph.ops if op.random] == ["mm_0"]
    written = graph.ops[2].outputs[0]
    assert graph.values[written].storage == 3
    assert written in graph.ops[5].inputs  # by way of the alias
    assert (graph.fixed_bytes, graph.forward_ops, costs.total_time_ns) == (100, 2, 17)


def test_graphs_of_random_traces_run_within_the_traces_peak() -> None:
    for seed in range(30):
        trace = random_trace(seed)
        graph, costs = graph_from_json(trace_to_graph(trace))
        plain = simulate(graph, costs, keep_all_schedule(graph))
        unread_views = trace.time_ns - plain.time_ns
        views = [call for call in trace.calls() if all(created.alias_of is not None for created in call.creates)]
        assert 0 <= unread_views <= sum(call.time_ns for call in views)
        assert plain.peak_bytes <= unconstrained_peak_bytes(trace)

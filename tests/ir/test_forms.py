"""JSON and text forms: round trips, published DAGs, and files that are not what they should be."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import PlanError
from lowtide.ir import (
    Costs,
    Graph,
    format_graph,
    format_schedule,
    graph_from_json,
    graph_to_json,
    keep_all_schedule,
    load_instance,
    schedule_from_json,
    schedule_from_sequence,
    schedule_to_json,
    simulate,
)
from lowtide.ir.serial import dag_from_json
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.sequences import random_sequence
from tests.support.text_forms import parse_graph, parse_schedule
from tests.support.wide import seeds

_DAG: dict[str, Any] = {
    "format": "lowtide-dag/1",
    "name": "chain",
    "fixed_bytes": 5,
    "ops": [
        {"name": "a", "time_ns": 1, "bytes": 10, "workspace_bytes": 0, "inputs": []},
        {"name": "b", "time_ns": 2, "bytes": 20, "workspace_bytes": 3, "inputs": [0]},
        {"name": "c", "time_ns": 3, "bytes": 30, "workspace_bytes": 0, "inputs": [0, 1]},
    ],
    "forward_ops": 2,
    "outputs": [2],
}


def _same(left: tuple[Graph, Costs], right: tuple[Graph, Costs]) -> bool:
    columns = ("time_ns", "workspace_bytes", "storage_bytes")
    same_columns = all(getattr(left[1], name).tolist() == getattr(right[1], name).tolist() for name in columns)
    return left[0] == right[0] and same_columns and left[1].rng_state_bytes == right[1].rng_state_bytes


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_round_trips(seed: int) -> None:
    graph, costs = overwriting(*random_graph(seed, 4 + seed), seed)
    schedule = schedule_from_sequence(graph, random_sequence(graph, seed))
    assert _same(graph_from_json(json.loads(json.dumps(graph_to_json(graph, costs)))), (graph, costs))
    assert schedule_from_json(json.loads(json.dumps(schedule_to_json(schedule)))) == schedule
    parsed, parsed_costs = parse_graph(format_graph(graph, costs))
    assert parsed_costs is not None
    assert _same((parsed, parsed_costs), (graph, costs))
    assert parse_graph(format_graph(graph)) == (graph, None)
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_compact_form_leaves_out_defaults_and_loads_the_same() -> None:
    graph, costs = random_graph(4, 20)
    bare = dataclasses.replace(graph.values[0], dtype="", shape=())
    graph = dataclasses.replace(graph, values=(bare, *graph.values[1:]))
    compact, whole = graph_to_json(graph, costs, compact=True), graph_to_json(graph, costs)
    defaults = {
        "ops": {"workspace_bytes": 0, "flags": [], "overwrites": [], "module": "", "source": ""},
        "values": {"dtype": "", "shape": []},
    }
    for kind, left_out in defaults.items():
        assert [{**left_out, **entry} for entry in compact[kind]] == whole[kind]
        assert all(
            entry[key] != default for entry in compact[kind] for key, default in left_out.items() if key in entry
        )
        assert any(left_out.keys() - entry.keys() for entry in compact[kind])
    again, same_costs = graph_from_json(compact)
    assert graph_to_json(again, same_costs) == graph_to_json(graph, costs)
    assert again == graph


def test_published_dag(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(_DAG))
    graph, costs = load_instance(path)
    result = simulate(graph, costs, keep_all_schedule(graph))
    assert (result.peak_bytes, result.time_ns) == (5 + 10 + 20 + 30, 6)


def test_an_op_that_nobody_reads_runs_and_is_freed_at_once() -> None:
    data = copy.deepcopy(_DAG)
    data["outputs"] = []
    graph, costs = dag_from_json(data)
    result = simulate(graph, costs, keep_all_schedule(graph))
    assert (result.time_ns, result.final_bytes) == (6, 5)


def _change(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change("format", value="lowtide-dag/9"), "lowtide-dag/9"),
        (_change("ops", 1, "inputs", value=[1]), "b .1. reads op 1"),
        (_change("ops", 1, "inputs", value=[7]), "reads op 7"),
        (_change("ops", 2, "bytes", value=-1), "c: -1"),
        (_change("ops", 2, "time_ns", value="soon"), "c: 'soon'"),
        (_change("outputs", value=[3]), "outputs: 3"),
        (_change("ops", value=[]), "forward|no ops|outputs"),
        (_change("ops", 0, value={"name": "a", "inputs": []}), "time_ns"),
    ],
)
def test_bad_dags_say_what_is_wrong(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = copy.deepcopy(_DAG)
    change(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        load_instance(path)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "list"), ("{}", "format")])
def test_files_that_are_no_graphs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_instance(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        load_instance(tmp_path / "none.json")

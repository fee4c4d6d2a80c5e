"""Whatever stands in a file, reading it gives a usable graph or a ``PlanError``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import PlanError
from lowtide.ir import (
    check,
    format_graph,
    graph_from_json,
    graph_to_json,
    keep_all_schedule,
    load_instance,
    schedule_from_json,
    simulate,
)
from lowtide.ir.serial import dag_from_json
from tests.support.chains import chain_dag
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.text_forms import parse_graph
from tests.support.wide import is_wide

_JUNK = [
    None,
    True,
    -1,
    10**6,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [["x"] * 900],
    {},
    [0],
    [-1],
    "absent",
]


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _paths(data[key], (*path, key))


def _replaced(data: dict[str, Any], path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    if junk == "absent":
        del inner[path[-1]]
    else:
        inner[path[-1]] = junk
    return data


@pytest.mark.parametrize(
    "data", [chain_dag(2), graph_to_json(*overwriting(*random_graph(10, 5), 10))], ids=["dag", "graph"]
)
def test_junk_anywhere_is_refused_or_harmless(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "junk.json"
    refused = 0
    for number, place in enumerate(_paths(data)):
        for junk in _JUNK if is_wide() else _JUNK[number % 3 :: 3]:
            path.write_text(json.dumps(_replaced(data, place, junk)))
            try:
                graph, costs = load_instance(path)
            except PlanError as error:
                assert len(str(error)) < len(str(path)) + 300
                refused += 1
                continue
            schedule = keep_all_schedule(graph)
            check(graph, schedule)
            simulate(graph, costs, schedule)
            assert parse_graph(format_graph(graph, costs))[0] == graph
    assert refused > (200 if is_wide() else 66)


def test_a_boundary_behind_the_last_op() -> None:
    data = graph_to_json(*random_graph(10, 8))
    data["forward_ops"] = len(data["ops"]) + 1
    with pytest.raises(PlanError, match="forward_ops"):
        graph_from_json(data)


def test_a_forward_output_behind_the_boundary() -> None:
    data = graph_to_json(*random_graph(10, 8))
    data["forward_outputs"] = data["ops"][-1]["outputs"]
    with pytest.raises(PlanError, match="is of an op of the backward pass"):
        graph_from_json(data)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\x00", ""])
def test_files_that_are_not_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="is not JSON"):
        load_instance(path)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([["compute", -1]], "compute step: -1"),
        ([["compute", float("inf")]], "compute step: inf"),
        ([["run", 0]], "run"),
        ([["compute"]], "malformed"),
        (5, "malformed"),
    ],
)
def test_bad_schedules(steps: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedule_from_json({"format": "lowtide-schedule/1", "steps": steps, "boundary": 0})


_TEXT = """\
graph small fixed_bytes=3
costs device=cpu rng_state_bytes=8
storage s0 external bytes=0
storage s1 op=0 bytes=40
value %0:s0 x float32[2,5]
inputs %0
forward_outputs %1
outputs %2
forward:
%1:s1 h float32[10] = aten.relu(%0) name=relu module=layers.0 source="model.py:7" time_ns=5 workspace_bytes=0
%2:s1 v float32[5,2] = aten.view(%1) name=view time_ns=0 workspace_bytes=0
backward:
"""


def test_text_of_a_small_graph() -> None:
    graph, costs = parse_graph(_TEXT)
    assert costs is not None
    assert format_graph(graph, costs) == _TEXT


@pytest.mark.parametrize("producer", [True, 1.0])
def test_a_producer_that_only_equals_a_number(producer: Any) -> None:
    data = graph_to_json(*random_graph(10, 8))
    value = next(value for value in data["values"] if value["producer"] == 1)
    value["producer"] = producer
    with pytest.raises(PlanError, match="is not the number of an op"):
        graph_from_json(data)


@pytest.mark.parametrize(
    ("key", "what"), [("bytes", "bytes"), ("workspace_bytes", "bytes"), ("time_ns", "nanoseconds")]
)
def test_numbers_whose_sum_is_too_large(key: str, what: str) -> None:
    data = chain_dag(600)
    for op in data["ops"]:
        op[key] = 2**50
    with pytest.raises(PlanError, match=f"{what} together"):
        dag_from_json(data)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "marked.json"
    path.write_text(json.dumps(chain_dag(2)), encoding="utf-8-sig")
    assert load_instance(path)[0] == dag_from_json(chain_dag(2))[0]

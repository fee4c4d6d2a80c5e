"""The logs published with DTR: a small one by hand, and every row of the published simulator's results.

The published files are read in place, from ``LOWTIDE_INSTANCES`` or ``../shared/instances``; skipped where absent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import LowtideError
from lowtide.ir import keep_all_schedule, load_instance
from lowtide.ir import simulate as simulate_schedule
from lowtide.ir.serial import dag_from_json, graph_from_json
from lowtide.trace import (
    Constant,
    Created,
    OperatorCall,
    Pin,
    Release,
    ReplayStatus,
    Trace,
    read_trace,
    simulate,
    trace_to_dag,
    trace_to_graph,
    unconstrained_peak_bytes,
    write_trace,
)

FOLDER = Path(os.environ.get("LOWTIDE_INSTANCES", Path(__file__).parents[3] / "shared" / "instances"))
published = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published instances in {FOLDER}")
NAMES = ("resnet32", "unet", "transformer", "lstm")
OURS = {"eq": "dtr-eq", "local": "dtr-local"}  # the others have the same names

LOG: list[dict[str, Any]] = [
    {"INSTRUCTION": "CONSTANT", "NAME": "before"},
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "8"},
    {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": ["w"], "RESULT": ["a", "b"], "TIME": "5"},
    {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": "4"},
    {"INSTRUCTION": "ALIAS", "NAME": "a", "ALIAS": "-1"},
    {"INSTRUCTION": "MEMORY", "NAME": "b", "MEMORY": "8"},
    {"INSTRUCTION": "ALIAS", "NAME": "b", "ALIAS": "0"},
    {"INSTRUCTION": "COPY", "DST": "a2", "SRC": "a"},
    {"INSTRUCTION": "RELEASE", "NAME": "a"},
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"},
    {"INSTRUCTION": "MUTATE", "NAME": "relu_", "ARGS": ["a2", "w"], "MUTATE": [0], "TIME": "3"},
    {"INSTRUCTION": "COPY_FROM", "DST": "b", "SRC": "a2"},
    {"INSTRUCTION": "RELEASE", "NAME": "unknown"},
    {"INSTRUCTION": "RELEASE", "NAME": "a2"},
]


def read_log(folder: Path, records: list[dict[str, Any]]) -> Trace:
    path = folder / "small.log"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return read_trace(path)


def test_a_small_log(tmp_path: Path) -> None:
    trace = read_log(tmp_path, LOG)
    assert trace.events == (
        Constant(0, 8),
        OperatorCall("mm", 5, (0,), (Created(1, 4), Created(2, 0, 0))),
        OperatorCall("relu_", 3, (1, 0), (Created(3, 4),)),
        Release(1),
        Release(2),
        Pin(0),
        Pin(3),
    )
    assert (trace.name, trace.forward_calls, trace.time_ns) == ("small", 1, 8)


@pytest.mark.parametrize(
    ("position", "record", "message"),
    [
        (3, {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "8"}, "line 4: expected MEMORY of w"),
        (9, {"INSTRUCTION": "COPY", "DST": "a2", "SRC": "x"}, "line 10: KeyError: 'x'"),
        (9, {"INSTRUCTION": "MOVE"}, "line 10: unknown instruction 'MOVE'"),
        (9, {"NOTHING": 1}, "line 10: not an INSTRUCTION"),
    ],
)
def test_faults(position: int, record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LowtideError) as caught:
        read_log(tmp_path, [*LOG[:position], record, *LOG[position + 1 :]])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("position", "record", "message"),
    [
        (3, {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": 1e400}, "line 4: OverflowError"),
        (3, {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "-8"}, "line 4: MEMORY: -8 is not a whole number"),
        (11, {"INSTRUCTION": "RELEASE", "NAME": "b"}, "line 14: unknown name 'b'"),
    ],
)
def test_numbers_and_names_that_cannot_be(position: int, record: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LowtideError) as caught:
        read_log(tmp_path, [*LOG[:position], record, *LOG[position + 1 :]])
    assert message in str(caught.value)


def test_a_name_that_is_given_again_or_released_twice(tmp_path: Path) -> None:
    again = [
        {"INSTRUCTION": "CALL", "NAME": "add", "ARGS": ["a2", "w"], "RESULT": ["a2"], "TIME": "2"},
        {"INSTRUCTION": "MEMORY", "NAME": "a2", "MEMORY": "4"},
        {"INSTRUCTION": "ALIAS", "NAME": "a2", "ALIAS": "-1"},
        {"INSTRUCTION": "COPY", "DST": "a2", "SRC": "a2"},
        {"INSTRUCTION": "RELEASE", "NAME": "w"},
        {"INSTRUCTION": "RELEASE", "NAME": "w"},
    ]
    trace = read_log(tmp_path, [*LOG[:11], *again])
    assert trace.events[2:] == (
        OperatorCall("add", 2, (1, 0), (Created(3, 4),)),
        Release(1),
        Release(0),
        Pin(2),
        Pin(3),
    )
    assert graph_from_json(trace_to_graph(trace))[0].ops


def test_empty_lines_are_no_events(tmp_path: Path) -> None:
    path = tmp_path / "small.log"
    path.write_text("\n\n".join(map(json.dumps, LOG)) + "\n\n")
    assert read_trace(path) == read_log(tmp_path, LOG)


def reference() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "reference_dtr_simulator.json").read_text())
    return found


@published
@pytest.mark.parametrize("name", NAMES)
def test_every_published_figure(name: str) -> None:
    trace = read_trace(FOLDER / "dtr_logs" / f"{name}.log.gz")
    expected = reference()[name]
    assert unconstrained_peak_bytes(trace) == expected["peak_bytes"]
    assert trace.time_ns == expected["compute_ns"]
    rows = 0
    for heuristic, by_ratio in expected["overhead"].items():
        for ratio, slowdown in by_ratio.items():
            budget = int(expected["peak_bytes"] * float(ratio))
            result = simulate(trace, budget, OURS.get(heuristic, heuristic))
            found = result.slowdown if result.status is ReplayStatus.OK else result.status.value
            assert found == (slowdown if isinstance(slowdown, str) else pytest.approx(slowdown, abs=1e-4)), (
                heuristic,
                ratio,
            )
            assert result.peak_bytes <= budget
            rows += 1
    assert rows == {"resnet32": 60, "unet": 60, "transformer": 36, "lstm": 18}[name]


@published
@pytest.mark.parametrize("name", NAMES)
def test_the_same_trace_in_our_format(name: str, tmp_path: Path) -> None:
    trace = read_trace(FOLDER / "dtr_logs" / f"{name}.log.gz")
    write_trace(trace, tmp_path / "run.gz")
    assert read_trace(tmp_path / "run.gz") == trace


@published
@pytest.mark.parametrize("name", NAMES)
def test_the_derived_graphs(name: str) -> None:
    """Operators, sizes, times, edges and outputs are those of the derived graphs; our constants are counted, as fixed."""
    trace = read_trace(FOLDER / "dtr_logs" / f"{name}.log.gz")
    dag, derived = trace_to_dag(trace), json.loads((FOLDER / f"dtr_{name}.json").read_text())
    assert dag["ops"] == [{**op, "name": ours["name"]} for op, ours in zip(derived["ops"], dag["ops"], strict=True)]
    assert (dag["outputs"], dag["forward_ops"]) == (derived["outputs"], derived["forward_ops"])
    assert dag["fixed_bytes"] == reference()[name]["constant_bytes"]
    graph, costs = dag_from_json(dag)
    theirs = simulate_schedule(
        *(instance := load_instance(FOLDER / f"dtr_{name}.json")), keep_all_schedule(instance[0])
    )
    ours = simulate_schedule(graph, costs, keep_all_schedule(graph))
    assert (ours.peak_bytes - graph.fixed_bytes, ours.time_ns) == (theirs.peak_bytes, theirs.time_ns)


@published
@pytest.mark.parametrize("name", NAMES)
def test_graphs_take_the_whole_time(name: str) -> None:
    trace = read_trace(FOLDER / "dtr_logs" / f"{name}.log.gz")
    graph, costs = graph_from_json(trace_to_graph(trace))
    plain = simulate_schedule(graph, costs, keep_all_schedule(graph))
    assert plain.time_ns == trace.time_ns
    assert plain.peak_bytes <= unconstrained_peak_bytes(trace)

"""The readable form of a plan."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.ir import Graph
from lowtide.ir.serial import dag_from_json
from lowtide.planning import make_plan
from lowtide.report.modules import ModuleRow, block_of, merge_repeats
from lowtide.units import format_bytes, format_percent, format_time
from tests.support.chains import chain_dag

GRAPH, COSTS = dag_from_json(chain_dag(4))


@pytest.fixture(autouse=True, scope="module")
def brief_searches() -> None:
    """The bound of a search is shown."""


def _with_modules(graph: Graph) -> Graph:
    ops = [dataclasses.replace(op, module=f"layers.{op.id % 4}.linear", source="model.py:7") for op in graph.ops]
    return dataclasses.replace(graph, ops=tuple(ops))


def test_golden() -> None:
    plan = make_plan(_with_modules(GRAPH), COSTS, budget="80%", planner="auto")
    text = str(dataclasses.replace(plan, solve_seconds=0.04))
    assert text == GOLDEN


def test_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 278_139_912, 5 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "265.3 MiB", "5.0 TiB",
    ]  # fmt: skip
    assert [format_time(n) for n in (999, 1000, 1_234_567, 2 * 10**9)] == ["999 ns", "1.00 us", "1.23 ms", "2.00 s"]
    assert format_percent(0.1698) == "17.0 %"


def test_blocks() -> None:
    paths = {
        "transformer.h.0.mlp.act": "transformer.h.0",
        "0.weight": "0",
        "lm_head": "lm_head",
        "": "",
        "conv1.x": "conv1.x",
    }
    assert {path: block_of(path) for path in paths} == paths


def test_like_neighbours_are_merged() -> None:
    rows = [
        ModuleRow("stem", 5, 0, 0, 1),
        *(ModuleRow(f"h.{i}", 100, 2, 10 + i, 30) for i in range(3)),
        ModuleRow("h.3", 7, 0, 0, 30),
    ]
    merged = merge_repeats(rows)
    assert [row.name for row in merged] == ["stem", "h.0-2 (each)", "h.3"]
    assert merged[1] == ModuleRow("h.0-2 (each)", 100, 2, 11, 30)


GOLDEN = """\
plan of chain: 8 ops
  budget                  3.9 KiB (80.0 % of unconstrained)
  predicted peak          3.9 KiB (80.0 %)
  unconstrained peak      4.9 KiB
  overhead                5.6 % of 180 ns
  overhead's lower bound  5.6 %
  peak at                 gradient0 of layers.0.linear, backward, model.py:7
  planner                 auto, seed 0, 0.0 s
  costs                   as given

module              saved  recomputed ops  recompute time  time once
-----------------  ------  --------------  --------------  ---------
layers.0              0 B               1           10 ns      30 ns
layers.1-3 (each)  1000 B               -               -      50 ns"""

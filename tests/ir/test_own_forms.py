"""Graphs that people write by hand and no capture makes: views of two storages, random ops that overwrite, sizes of inputs."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.ir import Compute, check, keep_all_schedule, simulate
from lowtide.ir.serial import graph_from_json
from lowtide.solve import Problem, Status, minimum_peak, peak_lower_bound, solve, working_set_bound


def _graph(sizes: list[tuple[int | None, int]], ops: list[tuple[list[int], int, dict[str, Any]]]) -> dict[str, Any]:
    """``sizes``: base and bytes of each storage. Ops as (inputs, storage of the result, more fields); the last is returned."""
    externals = [storage for storage, (base, _) in enumerate(sizes) if base is None]
    values: list[dict[str, Any]] = [{"name": f"x{s}", "storage": s, "producer": None} for s in externals]
    values += [{"name": f"v{i}", "storage": storage, "producer": i} for i, (_, storage, _) in enumerate(ops)]
    return {
        "format": "lowtide-graph/1",
        "name": "own",
        "fixed_bytes": 0,
        "forward_ops": 0,
        "device": "",
        "rng_state_bytes": 0,
        "inputs": list(range(len(externals))),
        "storages": [{"base": base, "bytes": size} for base, size in sizes],
        "values": values,
        "ops": [
            {"name": f"op{i}", "target": "t", "inputs": inputs, "outputs": [len(externals) + i], "time_ns": 1,
             "workspace_bytes": 0, "flags": [], "overwrites": []} | more
            for i, (inputs, _, more) in enumerate(ops)
        ],
        "forward_outputs": [],
        "outputs": [len(values) - 1],
    }  # fmt: skip


def test_a_view_that_reads_another_storage_is_formed_after_it() -> None:
    graph, _ = graph_from_json(_graph([(0, 4), (1, 4)], [([], 0, {}), ([], 1, {}), ([0, 1], 0, {})]))
    schedule = keep_all_schedule(graph)
    check(graph, schedule)
    assert [step.op for step in schedule.steps if isinstance(step, Compute)] == [0, 1, 2]


@pytest.mark.parametrize("planner", ["auto", "greedy", "dtr", "checkmate"])
def test_a_random_op_may_overwrite(planner: str) -> None:
    ops: list[tuple[list[int], int, dict[str, Any]]] = [
        ([], 0, {}),
        ([0], 1, {"flags": ["random"], "overwrites": [0]}),
        ([0], 2, {"flags": ["effect"]}),
    ]
    graph, costs = graph_from_json(_graph([(0, 4), (1, 4), (2, 1)], ops))
    for budget in range(5, 12):
        solution = solve(Problem(graph, costs, budget), planner)
        assert solution.schedule is not None
        check(graph, solution.schedule)
        assert simulate(graph, costs, solution.schedule).peak_bytes <= budget


@pytest.mark.parametrize("external", [0, 100])
def test_the_size_of_an_input_counts_nowhere(external: int) -> None:
    ops: list[tuple[list[int], int, dict[str, Any]]] = [([0], 1, {}), ([1], 2, {}), ([2], 3, {}), ([0, 1, 3], 4, {})]
    graph, costs = graph_from_json(_graph([(None, external), (0, 4), (1, 4), (2, 4), (3, 1)], ops))
    reached, _ = minimum_peak(graph, costs)
    assert working_set_bound(graph, costs) <= peak_lower_bound(graph, costs) <= reached < 13
    for planner in ("auto", "checkmate{warm-start=false}", "checkmate{form=full,warm-start=false}"):
        solution = solve(Problem(graph, costs, reached), planner)
        assert solution.status is Status.OPTIMAL
        assert solution.time_ns == solve(Problem(graph, costs, reached), "auto").time_ns

"""Splitting a graph for its transfers, and placing them: what comes back is valid, computes the same and stays within bytes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Offload,
    Schedule,
    SecondMemory,
    check,
    graph_from_json,
    keep_all_schedule,
    schedule_from_sequence,
    simulate,
)
from lowtide.solve import Problem, solve
from lowtide.solve.bounds import time_bound
from lowtide.solve.model.compact import compact
from lowtide.solve.model.split import Split, movable_storages, split
from lowtide.solve.moving.bound import moving_bound
from lowtide.solve.moving.search import moving_schedule
from lowtide.solve.moving.steps import place_transfers
from tests.solve.brute_force_moves import memory_like
from tests.solve.small_graphs import chain
from tests.support.interpreter import Machine
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.sequences import random_sequence
from tests.support.wide import seeds


def _case(seed: int) -> tuple[random.Random, Graph, Costs, Split, Schedule]:
    """A graph, and a schedule of its split form in which all kinds of things run again."""
    draw = random.Random(seed)
    graph, costs = random_graph(seed, draw.randint(4, 30))
    graph, costs = overwriting(graph, costs, seed) if draw.random() < 0.5 else (graph, costs)
    memory = SecondMemory(*(draw.choice((10**7, 10**8, 10**9, 10**10)) for _ in range(2)), draw.choice((0, 50)))
    costs = replace(costs, second_memory=replace(memory, shared=draw.random() < 0.3))
    storages = [storage for storage in movable_storages(graph, costs) if draw.random() < 0.7]
    parts = split(graph, costs, {storage: draw.randint(0, 9) for storage in storages}, moves_only=draw.random() < 0.2)
    return draw, graph, costs, parts, schedule_from_sequence(parts.graph, random_sequence(parts.graph, seed))


@pytest.mark.parametrize("seed", seeds(40, 150))
def test_translated_schedules_compute_the_same(seed: int) -> None:
    _, graph, costs, parts, found = _case(seed)
    check(parts.graph, found)
    schedule = parts.schedule(found)
    check(graph, schedule)
    machine = Machine(graph, costs).run(schedule)
    plain = Machine(graph, costs).run(keep_all_schedule(graph))
    assert machine.timeline == simulate(graph, costs, schedule).timeline.tolist()
    assert machine.handed_over == plain.handed_over
    assert {value: machine.values[value] for value in graph.outputs} == {
        value: plain.values[value] for value in graph.outputs
    }
    again = Counter(step.op for step in found.steps if isinstance(step, Compute))
    fetches = sum(count - 1 for op, count in again.items() if parts.computed[op] is None)
    assert sum(isinstance(step, Fetch) for step in schedule.steps) == fetches


@pytest.mark.parametrize("seed", seeds(40, 150))
def test_placed_transfers_stay_within_the_budget_and_take_no_longer(seed: int) -> None:
    draw, graph, costs, parts, found = _case(seed)
    schedule = parts.schedule(found)
    before = simulate(graph, costs, schedule)
    budget = before.peak_bytes + draw.choice((0, 1, before.peak_bytes // 4, before.peak_bytes))
    placed = place_transfers(graph, costs, schedule, budget)
    check(graph, placed)
    machine = Machine(graph, costs).run(placed)
    after = simulate(graph, costs, placed)
    assert machine.timeline == after.timeline.tolist()
    assert after.peak_bytes <= budget
    computes = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    assert Counter(step.op for step in placed.steps if isinstance(step, Compute)) == computes
    if budget >= before.peak_bytes + sum(costs.storage_bytes.tolist()):
        assert not any(isinstance(step, (Offload, Fetch)) for step in placed.steps)


def test_transfers_hide_behind_computing() -> None:
    """A long chain with room for two of its results, moved by a link that is as quick as the operators."""
    graph, costs = _long_chain()
    parts = split(graph, costs, dict.fromkeys(movable_storages(graph, costs), 0), moves_only=True)
    fetches = {storage: op for op, storage in parts.fetched.items()}
    sequence = [op.id for op in parts.graph.ops]
    for step in range(12, 22):  # op12 .. op21 read v10 .. v1
        sequence.insert(sequence.index(parts.computed.index(step)), fetches[22 - step])
    schedule = parts.schedule(schedule_from_sequence(parts.graph, sequence))
    bare = simulate(graph, costs, schedule)
    assert bare.timing.wait_ns == 100
    placed = place_transfers(graph, costs, schedule, bare.peak_bytes + 8)
    assert simulate(graph, costs, placed).timing.wait_ns <= 20


def _long_chain() -> tuple[Graph, Costs]:
    graph, costs = chain(12, times=(10,) * 24)
    return graph, replace(costs, second_memory=SecondMemory(400_000_000, 400_000_000))


@pytest.mark.parametrize("seed", seeds(4, 8))
def test_auto_is_never_above_the_others(seed: int) -> None:
    """Nor above itself without the second memory."""
    graph, costs = random_graph(seed, 30) if seed % 2 else chain(14, times=tuple(3 + seed * i % 7 for i in range(28)))
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    still = Problem(graph, costs, top * (6, 8)[seed % 4 == 0] // 10)
    problem = replace(still, costs=replace(costs, second_memory=memory_like(costs, (20, 100, 400)[seed % 3])))
    found = solve(problem, "auto{effort=1}")
    for other in (solve(problem, "pofo"), solve(problem, "rotor"), solve(still, "auto{effort=1}")):
        if other.status.solved:
            assert found.status.solved and found.time_ns <= other.time_ns, other.planner
    assert found.lower_bound_ns is None or found.lower_bound_ns <= found.time_ns


@pytest.mark.parametrize("length", [8, 16])
def test_a_link_of_no_use_is_bounded_as_none(length: int) -> None:
    """A transfer that takes longer than the whole program leaves recomputing alone, and the bound knows."""
    graph, costs = chain(length, times=tuple(10 + i % 3 for i in range(2 * length)))
    budget = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes * 6 // 10
    alone = time_bound(compact(graph, costs), budget, effort=1)
    least = costs.total_time_ns
    bounds = [
        moving_bound(Problem(graph, replace(costs, second_memory=memory_like(costs, percent)), budget), 1)
        for percent in (10**6, 400, 100)
    ]
    assert alone > least + 20
    assert bounds[0] >= least + 0.9 * (alone - least)
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] <= alone


def test_transfers_that_take_for_ever() -> None:
    """Centuries in nanoseconds, of which the sum is more than 64 bits hold."""
    graph, costs = _long_chain()
    slow = replace(costs, storage_bytes=costs.storage_bytes * 10**11, second_memory=SecondMemory(1, 1))
    budget = simulate(graph, slow, keep_all_schedule(graph)).peak_bytes // 2
    solution = solve(Problem(graph, slow, budget), "auto{effort=2}")
    assert solution.schedule is not None
    assert not solution.schedule.moves
    moves = moving_schedule(Problem(graph, slow, budget), 0, None)
    assert moves is not None and moves.moves


def test_an_operator_that_runs_again_for_what_cannot_move_pays_once() -> None:
    """No bound is above a schedule: the first operator makes a result that is handed on to the end and one that may move."""

    def op(name: str, reads: list[int], makes: list[int], time_ns: int, workspace: int = 0) -> dict[str, object]:
        return {
            "name": name, "target": name, "inputs": reads, "outputs": makes, "time_ns": time_ns, "workspace_bytes": workspace,
        }  # fmt: skip

    bases, sizes = [0, 0, 1, 2, 3], [10, 10, 1, 1, 1]
    graph, costs = graph_from_json(
        {
            "format": "lowtide-graph/2", "name": "x", "fixed_bytes": 0, "device": "", "rng_state_bytes": 0, "inputs": [],
            "forward_ops": 0, "second_memory": {"offload_bytes_per_second": 1000, "fetch_bytes_per_second": 1000},
            "storages": [{"base": base, "bytes": size} for base, size in zip(bases, sizes, strict=True)],
            "values": [{"name": f"v{i}", "storage": i, "producer": base} for i, base in enumerate(bases)],
            "ops": [op("a", [], [0, 1], 100), op("b", [0, 1], [2], 1), op("c", [2], [3], 1, 25), op("d", [0, 3], [4], 1)],
            "forward_outputs": [], "outputs": [1, 4],
        }
    )  # fmt: skip
    steps = (
        Compute(0), Compute(1), Free(0), Free(1), Compute(2), Free(2), Compute(0), Compute(3), Free(0), Free(3),
    )  # fmt: skip
    check(graph, Schedule(steps, 0))
    known = simulate(graph, costs, Schedule(steps, 0))
    problem = Problem(graph, costs, known.peak_bytes)
    assert moving_bound(problem, 3) <= known.time_ns
    solution = solve(problem)
    assert solution.time_ns <= known.time_ns
    assert solution.lower_bound_ns is not None
    assert solution.lower_bound_ns <= known.time_ns

"""Sequences from checkpoints, and the planners that choose them."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from lowtide.ir import Compute, Costs, Graph, keep_all_schedule, simulate
from lowtide.solve import Problem, Status, solve
from lowtide.solve.chen import every_root, greedy_sets, moved_back
from lowtide.solve.griewank import slot_sequence, states_of
from lowtide.solve.model.checkpoints import kept_sequence, make_readers, nothing_kept_sequence
from lowtide.solve.model.compact import CompactGraph, Indices, compact
from lowtide.solve.model.sweep import sweep
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds

CHAIN_PLANNERS = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")
PLANNERS = (*CHAIN_PLANNERS, "checkpoint-all-ap", "checkpoint-last", "griewank")


def reads(model: CompactGraph, node: int) -> Iterator[tuple[int, int]]:
    """(storage, node that allocates it)."""
    for storage in model.reads[model.reads_start[node] : model.reads_start[node + 1]].tolist():
        yield storage, int(model.storage_node[storage])


def assert_dropped_nodes_are_rebuilt(model: CompactGraph, codes: Indices, kept: set[int]) -> None:
    """No result of a dropped forward node is carried from the forward pass into the backward pass."""
    renewed: set[int] = set()
    for code in codes.tolist():
        node = code if code >= 0 else ~code
        if code < 0 or node >= model.boundary:
            for storage, source in reads(model, node):
                dropped = source < model.boundary and source not in kept and model.recomputable[source]
                assert not dropped or model.held[storage] or source in renewed
        if code < 0:
            assert node not in kept and model.recomputable[node]
            renewed.add(node)


def assert_every_recompute_is_used(model: CompactGraph, codes: Indices) -> None:
    assert len(sweep(model, codes).codes) == len(codes)


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_any_kept_set_gives_a_sequence_without_carried_or_unused_results(seed: int) -> None:
    draw = random.Random(seed)
    for graph, costs in (small_graph(seed, 9), random_graph(seed, 40)):
        readers = make_readers(compact(graph, costs))
        model = readers.model
        for share in (0.0, 0.2, 0.6):
            kept = {node for node in range(model.boundary) if draw.random() < share}
            codes = kept_sequence(readers, kept)
            assert codes[codes >= 0].tolist() == list(range(model.nodes + 1))
            assert_every_recompute_is_used(model, codes)
            assert_dropped_nodes_are_rebuilt(model, codes, kept | {*range(max(kept, default=0), model.boundary)})
        assert_every_recompute_is_used(model, nothing_kept_sequence(readers))
        for slots in (1, 2, 3):
            assert_every_recompute_is_used(model, slot_sequence(readers, states_of(model), slots))


def test_a_long_skip_is_rebuilt_for_its_reader_and_for_its_own_segment() -> None:
    graph, costs = chain(6)
    ops = list(graph.ops)
    ops[3] = dataclasses.replace(ops[3], inputs=(0, *ops[3].inputs))  # op 3 reads the result of op 0 too
    model = compact(dataclasses.replace(graph, ops=tuple(ops)), costs)
    codes = kept_sequence(make_readers(model), [1, 4])
    assert codes.tolist() == [0, 1, 2, 3, 4, 5, 6, ~0, ~2, ~3, 7, 8, 9, ~0, 10, 11, 12]


def test_nothing_is_recomputed_when_all_is_kept() -> None:
    readers = make_readers(compact(*chain(6)))
    assert kept_sequence(readers, []).tolist() == kept_sequence(readers, range(6)).tolist() == list(range(13))


def test_rules_on_a_chain() -> None:
    model = compact(*chain(9))
    assert every_root(model, range(9)) == [[2, 5, 8]]
    sets = greedy_sets(model, range(9))
    assert sets[0] == list(range(9)) and sets[1] == [1, 3, 5, 7] and sets[2] == [2, 5, 8] and sets[-1] == [8]
    assert list(moved_back([[0, 4, 5, 8]], [1, 4, 7])) == [[4, 7]]


def test_the_sweep_meets_every_choice_on_small_graphs() -> None:
    met = 0
    for seed in range(40):
        model = compact(*small_graph(seed, 9))
        sets = greedy_sets(model, range(model.boundary))
        for size in range(sum(model.storage_bytes.tolist())):
            chosen = exceeding(model, size)
            if chosen:
                assert chosen in sets
                met += 1
    assert met > 40


def exceeding(model: CompactGraph, size: int) -> list[int]:
    chosen, held = [], 0
    for node in range(model.boundary):
        held += sum(
            int(model.storage_bytes[s]) for s in range(len(model.storage_node)) if model.storage_node[s] == node
        )
        if held > size:
            chosen.append(node)
            held = 0
    return chosen


@functools.cache
def optima(seed: int) -> dict[int, int | None]:
    """The least time by budget: around the least peak, halfway, and just below the peak without recomputation."""
    graph, costs = small_graph(seed, 5 + seed % 3)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    least = brute_force(graph, costs, None)
    assert least is not None
    budgets = {least - 1, least, (least + top) // 2, top - 1}
    return {budget: brute_force(graph, costs, budget) for budget in sorted(budgets)}


@pytest.mark.parametrize("planner", PLANNERS)
def test_never_below_the_optimum(planner: str) -> None:
    solved = 0
    for seed in range(80):
        graph, costs = small_graph(seed, 5 + seed % 3)
        for budget, optimum in optima(seed).items():
            solution = solve(Problem(graph, costs, budget), planner)
            assert not solution.status.solved or (optimum is not None and solution.time_ns >= optimum)
            solved += solution.status.solved
    assert solved > 5


@pytest.mark.parametrize("planner", PLANNERS)
def test_more_budget_is_never_slower_and_the_minimum_is_reached(planner: str) -> None:
    for graph, costs in (
        chain(12),
        *(small_graph(seed, 9) for seed in range(12)),
        *(random_graph(s, 40) for s in range(8)),
    ):
        plain = simulate(graph, costs, keep_all_schedule(graph))
        below = solve(Problem(graph, costs, 0), planner)
        assert below.status is Status.UNSOLVED and below.minimum_bytes is not None
        assert solve(Problem(graph, costs, below.minimum_bytes), planner).status.solved
        assert not solve(Problem(graph, costs, below.minimum_bytes - 1), planner).status.solved
        times = []
        for budget in np.linspace(below.minimum_bytes, plain.peak_bytes, 12).astype(int).tolist():
            times.append(solve(Problem(graph, costs, budget), planner).time_ns)
        assert times == sorted(times, reverse=True)
        for budget in (plain.peak_bytes, 2**60):
            solution = solve(Problem(graph, costs, budget), planner)
            assert solution.status is Status.OPTIMAL and solution.time_ns == plain.time_ns
            assert solution.planner == planner


@pytest.mark.parametrize("planner", PLANNERS)
def test_scaling_bytes_and_budget_changes_nothing(planner: str) -> None:
    for graph, costs in (chain(30, times=tuple(1 + i % 5 for i in range(60))), random_graph(3, 40)):
        scaled = Costs(costs.time_ns, costs.workspace_bytes * 4, costs.storage_bytes * 4, costs.rng_state_bytes * 4)
        graph_scaled = dataclasses.replace(graph, fixed_bytes=graph.fixed_bytes * 4)
        top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        for budget in (top // 2, 3 * top // 4, top - 1):
            first = solve(Problem(graph, costs, budget), planner)
            assert first.schedule == solve(Problem(graph_scaled, scaled, 4 * budget), planner).schedule


def computes(planner: str, graph: Graph, costs: Costs, budget: int) -> list[int]:
    schedule = solve(Problem(graph, costs, budget), planner).schedule
    assert schedule is not None
    return [step.op for step in schedule.steps if isinstance(step, Compute)]


@pytest.mark.parametrize("planner", CHAIN_PLANNERS)
def test_golden_schedule_of_a_chain_keeps_every_other_op(planner: str) -> None:
    assert computes(planner, *chain(6), 20) == [0, 1, 2, 3, 4, 5, 4, 6, 7, 2, 8, 9, 0, 10, 11]


def test_golden_schedule_that_keeps_the_last_op_only() -> None:
    assert computes("checkpoint-last", *chain(4), 12) == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 0, 6, 7]


def test_all_articulation_points_of_a_chain_are_the_whole_chain() -> None:
    graph, costs = chain(6)
    solution = solve(Problem(graph, costs, 27), "checkpoint-all-ap")
    assert solution.status is Status.UNSOLVED and solution.minimum_bytes == 28


def test_articulation_points_skip_the_inside_of_blocks() -> None:
    graph, costs = blocks(4)
    rebuilt = [*range(12), 9, 10, 12, 13, 14, 6, 7, 15, 16, 17, 3, 4, *range(18, 24)]  # the first block is a chain
    assert computes("checkpoint-all-ap", graph, costs, 36) == rebuilt


def blocks(count: int) -> tuple[Graph, Costs]:
    """Residual blocks ``y = x + g(f(x))`` whose f and g are read again by the backward pass."""
    graph, costs = chain(3 * count)
    ops = list(graph.ops)
    for block in range(count):
        add = 3 * block + 2
        ops[add] = dataclasses.replace(ops[add], inputs=tuple(i for i in (add - 3, add - 1) if i >= 0))
    return dataclasses.replace(graph, ops=tuple(ops)), costs

"""Planners and bounds with a second memory against every schedule of tiny graphs that may move storages."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lowtide.ir import Costs, Graph, keep_all_schedule, simulate
from lowtide.solve import Problem, Solution, Status, peak_lower_bound, solve
from lowtide.solve.moving.bound import moving_bound
from tests.solve.brute_force import brute_force
from tests.solve.brute_force_moves import brute_force_moves, memory_like
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting
from tests.support.wide import seeds


def make(seed: int) -> tuple[Graph, Costs]:
    """A graph of any kind or a short chain, links of all kinds."""
    if seed % 2:
        graph, costs = drawn_chain(seed)
    elif seed % 4:
        graph, costs = small_graph(seed, 4)
    else:
        graph, costs = overwriting(*small_graph(seed, 5), seed)
    memory = memory_like(costs, (20, 50, 100)[seed % 3], latency_ns=seed % 5 == 0, shared=seed % 7 == 0)
    if seed % 11 == 0:
        memory = replace(memory, capacity_bytes=8)
    return graph, replace(costs, second_memory=memory)


def drawn_chain(seed: int) -> tuple[Graph, Costs]:
    """Of drawn times and bytes, in which one operator may run once only."""
    draw = random.Random(seed)
    graph, costs = chain(3, times=tuple(draw.randint(1, 9) for _ in range(6)))
    once = draw.randrange(4)
    ops = tuple(replace(op, once=op.id == once) for op in graph.ops)
    return replace(graph, ops=ops), replace(costs, storage_bytes=np.array([draw.randint(1, 8) for _ in range(6)]))


def cases(seed: int) -> list[tuple[int, int | None]]:
    """Budgets around the least peak, halfway, and just below the peak without recomputation, each with the optimum."""
    graph, costs = make(seed)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    least = brute_force_moves(graph, costs, None)
    assert least is not None
    budgets = sorted({least - 1, least, (least + top) // 2, top - 1})
    return [(budget, brute_force_moves(graph, costs, budget)) for budget in budgets]


def agrees(solution: Solution, optimum: int | None, case: tuple[int, int]) -> bool:
    """Whether the answer is the optimum; anything wrong fails."""
    if optimum is None:
        assert not solution.status.solved, case
        return True
    assert solution.status is not Status.INFEASIBLE, case
    assert solution.lower_bound_ns is None or solution.lower_bound_ns <= optimum, case
    if not solution.status.solved:
        return False
    assert solution.time_ns >= optimum, case
    assert solution.status is not Status.OPTIMAL or solution.time_ns == optimum, case
    return solution.time_ns == optimum


SEEDS = [seed for seed in seeds(24, 44) if len(make(seed)[0].storages) <= 6 and seed != 21]


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_are_never_above_the_optimum(seed: int) -> None:
    graph, costs = make(seed)
    least = brute_force_moves(graph, costs, None)
    assert least is not None
    assert peak_lower_bound(graph, costs) <= least
    for budget, optimum in cases(seed):
        if optimum is not None:
            assert moving_bound(Problem(graph, costs, budget), 2) <= optimum, budget


def test_moving_makes_graphs_quicker_and_lower() -> None:
    """What the search over schedules with transfers finds, and that without them does not."""
    lower = quicker = 0
    for seed in SEEDS:
        graph, costs = make(seed)
        bare = replace(costs, second_memory=None)
        least, without = brute_force_moves(graph, costs, None), brute_force(graph, bare, None)
        assert least is not None and without is not None and least <= without
        lower += least < without
        for budget, optimum in cases(seed):
            found = brute_force(graph, bare, budget)
            assert found is None or (optimum is not None and optimum <= found)
            quicker += found is not None and optimum is not None and optimum < found
    assert lower >= len(SEEDS) // 7
    assert quicker >= 2 * len(SEEDS) // 7


def compare(chosen: list[int], planner: str) -> tuple[int, int]:
    """(cases, cases in which the planner is as quick as the optimum)."""
    found = [
        agrees(solve(Problem(*make(seed), budget), planner), optimum, (seed, budget))
        for seed in chosen
        for budget, optimum in cases(seed)
    ]
    return len(found), sum(found)


@pytest.mark.parametrize(
    ("planner", "optimal"), [("auto{effort=1}", 53), ("offload{effort=0}", 41), ("pofo", 28), ("rotor", 27)]
)
def test_planners_are_never_better_than_the_optimum(planner: str, optimal: int) -> None:
    """And as good as it at least as often as ever; where nothing fits nothing is found."""
    total, equal = compare(SEEDS[:18], planner)
    assert total == 53
    assert equal >= optimal

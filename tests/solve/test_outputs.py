"""What the caller is handed may be freed, computed again and moved before that: nothing is said to be impossible, or optimal,
that leaves such schedules out."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lowtide.ir import Compute, Costs, Free, Graph, Op, Phase, SecondMemory, check, keep_all_schedule, simulate
from lowtide.solve import Problem, Status, minimum_peak, peak_lower_bound, solve
from lowtide.solve.bounds import time_bound
from lowtide.solve.model.compact import compact
from lowtide.solve.moving.bound import moving_bound
from tests.solve.brute_force import brute_force
from tests.solve.brute_force_moves import brute_force_moves, memory_like
from tests.solve.small_graphs import small_graph
from tests.support.wide import seeds


def handing(seed: int, ops: int) -> tuple[Graph, Costs]:
    """A small graph of which several results of the forward pass, large ones, go to the caller."""
    draw = random.Random(seed)
    graph, costs = small_graph(seed, ops)
    forward = [v.id for v in graph.values if v.producer is not None and v.producer < graph.forward_ops]
    chosen = draw.sample(forward, min(len(forward), draw.randint(1, 2)))
    sizes = costs.storage_bytes.copy()
    sizes[list({*graph.storages_of(chosen)})] *= draw.choice((1, 2))
    return replace(graph, forward_outputs=tuple(sorted(chosen))), replace(costs, storage_bytes=sizes)


def budgets(graph: Graph, costs: Costs, least: int) -> list[int]:
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    return sorted({least - 1, least, (least + top) // 2, top - 1})


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_every_claim_holds_for_schedules_that_compute_outputs_again(first: int) -> None:
    again = 0
    for seed in range(first, first + 40):
        graph, costs = handing(seed, 4 + seed % 3)
        least = brute_force(graph, costs, None)
        assert least is not None
        assert peak_lower_bound(graph, costs) <= least == minimum_peak(graph, costs)[0], seed
        floor = compact(graph, costs, floor=True)
        for budget in budgets(graph, costs, least):
            optimum = brute_force(graph, costs, budget)
            if optimum is not None:
                assert time_bound(floor, budget, effort=2) <= optimum, (seed, budget)
            found = solve(Problem(graph, costs, budget))
            assert found.status is (Status.INFEASIBLE if optimum is None else Status.OPTIMAL), (seed, budget)
            assert found.schedule is None or found.time_ns == optimum, (seed, budget)
            again += found.schedule is not None and _frees_before_handing(graph, found.schedule.steps)
    assert again >= 2


def _frees_before_handing(graph: Graph, steps: tuple[object, ...]) -> bool:
    handed = graph.storages_of(graph.forward_outputs)
    return any(Free(storage) in steps for storage in handed)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_claim_of_checkmate_holds_for_them(first: int) -> None:
    pytest.importorskip("highspy")
    for seed in range(first, first + 20):
        graph, costs = handing(seed, 4 + seed % 3)
        least = brute_force(graph, costs, None)
        assert least is not None
        for budget in budgets(graph, costs, least):
            optimum = brute_force(graph, costs, budget)
            found = solve(Problem(graph, costs, budget), "checkmate{form=full,warm-start=false}")
            assert found.status is (Status.INFEASIBLE if optimum is None else Status.OPTIMAL), (seed, budget)
            assert found.schedule is None or found.time_ns == optimum, (seed, budget)
        lowest = solve(Problem(graph, costs, 10**6), "checkmate{objective=peak,warm-start=false}")
        assert lowest.status is Status.OPTIMAL and lowest.peak_bytes == least


MOVING = [seed for seed in seeds(30, 60) if len(handing(seed, 4)[0].storages) <= 6]


@pytest.mark.parametrize("seed", MOVING)
def test_every_claim_holds_for_schedules_that_move_outputs(seed: int) -> None:
    graph, costs = handing(seed, 4)
    costs = replace(costs, second_memory=memory_like(costs, (20, 60)[seed % 2]))
    least = brute_force_moves(graph, costs, None)
    assert least is not None
    assert peak_lower_bound(graph, costs) <= least
    for budget in budgets(graph, costs, least):
        optimum = brute_force_moves(graph, costs, budget)
        found = solve(Problem(graph, costs, budget), "auto{effort=1}")
        if optimum is None:
            assert found.schedule is None
            continue
        assert found.status is not Status.INFEASIBLE
        assert moving_bound(Problem(graph, costs, budget), 2) <= optimum
        assert found.lower_bound_ns is None or found.lower_bound_ns <= optimum
        assert found.schedule is None or found.time_ns >= optimum
        assert found.status is not Status.OPTIMAL or found.time_ns == optimum


def in_the_way(length: int = 1, *, once: bool = False, late: bool = False) -> tuple[Graph, Costs]:
    """A large result for the caller comes before an operator that needs all the room: of the forward pass or, if ``late``, of
    the backward pass. Each of the ``length`` operators before them makes little; all but the last may run once only."""
    phases = [Phase.BACKWARD if late else Phase.FORWARD] * (length + 1)
    ops = [
        Op(0, "source", "source", (), (0,), Phase.FORWARD),
        *(Op(i, f"small{i}", "small", (i - 1,), (i,), Phase.FORWARD) for i in range(1, length)),
        Op(length, "output", "output", (length - 1,), (length,), phases[0], once=once),
        Op(length + 1, "wide", "wide", (length - 1,), (length + 1,), phases[0]),
        Op(length + 2, "narrow", "narrow", (length + 1,), (length + 2,), phases[0]),
        Op(length + 3, "last", "last", (length, length + 2), (length + 3,), Phase.BACKWARD),
    ]
    results = (length, length + 3) if late else (length + 3,)
    graph = Graph.of_results(
        "in the way", ops, list(range(length + 4)), results, forward_ops=length if late else length + 3
    )
    graph = graph if late else replace(graph, forward_outputs=(length,))
    sizes = np.array([1] * length + [8, 10, 1, 1])
    return graph, Costs(np.full(length + 4, 5), np.zeros(length + 4, np.int64), sizes)


@pytest.mark.parametrize("length", [1, 30])
def test_an_output_in_the_way_is_computed_again(length: int) -> None:
    graph, costs = in_the_way(length)
    found = solve(Problem(graph, costs, 12), "auto{effort=1}")
    assert found.schedule is not None and found.peak_bytes <= 12
    assert [step.op for step in found.schedule.steps if isinstance(step, Compute)].count(length) == 2
    assert found.lower_bound_ns is not None and found.lower_bound_ns <= found.time_ns
    assert minimum_peak(graph, costs)[0] <= 12
    check(graph, found.schedule)


@pytest.mark.parametrize("late", [False, True])
def test_an_output_that_cannot_be_computed_again_may_move(late: bool) -> None:
    graph, costs = in_the_way(once=True, late=late)
    assert solve(Problem(graph, costs, 12)).status is Status.INFEASIBLE
    moving = replace(costs, second_memory=SecondMemory(10**9, 10**9))
    assert brute_force_moves(graph, moving, 12) is not None
    assert peak_lower_bound(graph, moving) <= 12
    assert solve(Problem(graph, moving, 12), "auto{effort=1}").status is not Status.INFEASIBLE

"""Planning with collectives beside computing: against every schedule of tiny graphs, and what it is worth on larger ones."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from lowtide.errors import ScheduleError
from lowtide.ir import (
    Compute,
    Costs,
    Graph,
    Schedule,
    check,
    collectives_of,
    keep_all_schedule,
    may_run_early,
    simulate,
)
from lowtide.solve import Problem, Solution, Status, solve
from lowtide.solve.beside import in_line
from lowtide.solve.moving.steps import place_transfers
from tests.solve.brute_force_beside import brute_force_beside
from tests.solve.small_graphs import chain, sharded
from tests.support.wide import is_wide, seeds


def drawn(seed: int) -> tuple[Graph, Costs]:
    draw = random.Random(seed)
    graph, costs = chain(3) if seed % 2 else sharded(2)
    count = len(graph.ops)
    ops = list(graph.ops)
    if seed % 2:
        for place in draw.sample(range(count), 3):
            inputs = () if draw.random() < 0.6 else ops[place].inputs
            ops[place] = replace(ops[place], collective=True, inputs=inputs, once=draw.random() < 0.3)
    sizes = np.array([draw.randint(1, 6) for _ in graph.storages])
    times = np.array([draw.randint(1, 9) for _ in ops])
    return replace(graph, ops=tuple(ops)), replace(costs, time_ns=times, storage_bytes=sizes, collectives_beside=True)


def _budgets(graph: Graph, costs: Costs) -> list[int]:
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    return sorted({top, top + 3, top + 40, *(top - top * part // 8 for part in (1, 2, 3))})


@functools.cache
def _answers(seed: int) -> list[tuple[Solution, int | None]]:
    """By budget, what ``auto`` finds and the optimum."""
    graph, costs = drawn(seed)
    return [
        (solve(Problem(graph, costs, budget), "auto{effort=1}"), brute_force_beside(graph, costs, budget))
        for budget in _budgets(graph, costs)
    ]


@pytest.mark.parametrize("seed", seeds(20, 40))
def test_never_below_the_optimum_and_bounds_never_above(seed: int) -> None:
    for found, optimum in _answers(seed):
        if optimum is None:
            assert not found.status.solved
            continue
        assert found.status is not Status.INFEASIBLE
        assert found.lower_bound_ns is None or found.lower_bound_ns <= optimum
        if found.status.solved:
            assert found.time_ns >= optimum
            assert found.status is not Status.OPTIMAL or found.time_ns == optimum


def test_mostly_the_optimum() -> None:
    pairs = [
        (found.time_ns if found.status.solved else 2 * optimum, optimum)
        for seed in (range(40) if is_wide() else range(10, 30))
        for found, optimum in _answers(seed)
        if optimum is not None
    ]
    assert len(pairs) > (100 if is_wide() else 50)
    assert sum(found > optimum for found, optimum in pairs) <= len(pairs) // 8
    assert sum(found for found, _ in pairs) <= 1.02 * sum(optimum for _, optimum in pairs)


@pytest.mark.parametrize("percent", [100, 130, 80, 60])
def test_hiding_gains_and_keeps_the_order_of_collectives(percent: int) -> None:
    graph, costs = sharded(8)
    budget = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes * percent // 100
    found = solve(Problem(graph, costs, budget), "auto{effort=1}")
    exposed = solve(Problem(graph, in_line(graph, costs, 1.0), budget), "auto{effort=1}")
    assert found.schedule is not None
    assert exposed.schedule is not None
    assert found.lower_bound_ns is not None
    assert found.lower_bound_ns <= found.time_ns < simulate(graph, costs, exposed.schedule).time_ns < exposed.time_ns
    firsts = list(dict.fromkeys(collectives_of(graph, found.schedule)))
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("seed", seeds(12, 30))
def test_placing_never_makes_it_worse_and_keeps_the_order(seed: int) -> None:
    graph, costs = drawn(seed)
    for budget in _budgets(graph, costs):
        before = solve(Problem(graph, in_line(graph, costs, 1.0), budget), "auto{effort=0}").schedule
        if before is None:
            continue
        after = place_transfers(graph, costs, before, budget)
        check(graph, after)
        assert collectives_of(graph, after) == collectives_of(graph, before)
        old, new = simulate(graph, costs, before), simulate(graph, costs, after)
        assert new.time_ns <= old.time_ns
        assert new.peak_bytes <= budget


def test_a_gather_comes_early_where_there_is_room() -> None:
    graph, costs = sharded(3)
    kept = keep_all_schedule(graph)
    placed = place_transfers(graph, costs, kept, 10**6)
    check(graph, placed)
    # only the first gather and the last reduction are exposed
    assert simulate(graph, costs, kept).timing.exposed_ns > simulate(graph, costs, placed).timing.exposed_ns == 16
    assert solve(Problem(graph, costs, 10**6)).time_ns == simulate(graph, costs, placed).time_ns


def test_only_what_needs_nothing_of_the_program_may_run_early() -> None:
    graph, _ = sharded(2)
    assert [op.name for op in graph.ops if may_run_early(graph, op)] == ["gather0", "gather1"]
    early = (0, 2, 1, 3, 4, 5, 6, 7)
    check(graph, Schedule(tuple(map(Compute, early)), 4))
    with pytest.raises(ScheduleError, match="gather0 first runs after gather1"):
        check(graph, Schedule(tuple(map(Compute, (2, 0, 1, 3, 4, 5, 6, 7))), 4))
    with pytest.raises(ScheduleError, match="gather1 first runs after forward1"):
        free = replace(graph, ops=tuple(replace(op, inputs=()) for op in graph.ops))
        check(free, Schedule(tuple(map(Compute, (0, 1, 3, 2, 4, 5, 6, 7))), 4))


@pytest.mark.parametrize("planner", ["rotor", "chen-sqrt", "greedy", "keep-all"])
def test_planners_that_know_no_clock_gain_too(planner: str) -> None:
    graph, costs = sharded(4)
    budget = 2 * simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    found = solve(Problem(graph, costs, budget), planner)
    assert found.status.solved
    assert found.time_ns < simulate(graph, costs, keep_all_schedule(graph)).time_ns


def test_workspace_that_stays_longer_is_within_the_budget() -> None:
    graph, costs = sharded(4)
    costs = replace(costs, workspace_bytes=np.array([3 if op.collective else 0 for op in graph.ops]))
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    for budget in range(top // 2, top + 12, 3):
        found = solve(Problem(graph, costs, budget), "auto{effort=0}")
        if found.schedule is not None:
            assert simulate(graph, costs, found.schedule).peak_bytes <= budget

"""Checkmate's program with transfers against every schedule of tiny graphs that may move storages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.ir import Costs, Graph, check, keep_all_schedule, simulate
from lowtide.solve import Problem, Status, solve
from lowtide.solve.milp.linear import SolverOptions
from lowtide.solve.milp.search import NEVER
from lowtide.solve.moving import exact
from lowtide.solve.moving.exact import formulate, solve_with_transfers
from tests.solve.brute_force_moves import brute_force_moves, memory_like
from tests.solve.small_graphs import chain
from tests.solve.test_moving_optimum import SEEDS, agrees, cases, make
from tests.solve.test_outputs import MOVING, budgets, handing

pytest.importorskip("highspy")
COLD = "checkmate{warm-start=false,time-limit=20}"


def drawn(seed: int) -> list[tuple[Graph, Costs, int, int | None]]:
    """Budgets with the optimum of a graph that hands much to its caller."""
    graph, costs = handing(seed, 4)
    costs = replace(costs, second_memory=memory_like(costs, (20, 60)[seed % 2], shared=seed % 5 == 0))
    least = brute_force_moves(graph, costs, None)
    assert least is not None
    return [(graph, costs, each, brute_force_moves(graph, costs, each)) for each in budgets(graph, costs, least)]


def test_the_program_bounds_every_schedule_and_nearly_always_equals_the_best() -> None:
    met = [(*make(seed), budget, optimum) for seed in SEEDS[::2] for budget, optimum in cases(seed)]
    met += [case for seed in MOVING[::6] for case in drawn(seed)]
    equal = 0
    for graph, costs, budget, optimum in met:
        proof = solve_with_transfers(Problem(graph, costs, budget), SolverOptions(), optimum)
        assert proof.bound_ns <= (NEVER if optimum is None else optimum), (graph.name, budget)
        equal += proof.bound_ns == (NEVER if optimum is None else optimum)
        if proof.schedule is not None:
            check(graph, proof.schedule)
            run = simulate(graph, costs, proof.schedule)
            assert run.peak_bytes > budget or (optimum is not None and run.time_ns >= optimum)
    assert equal >= 0.9 * len(met) > 3 * len(SEEDS[::2])


def test_the_planner_agrees_with_every_schedule() -> None:
    optimal = proven = total = 0
    for seed in SEEDS[:18]:
        for budget, optimum in cases(seed):
            solution = solve(Problem(*make(seed), budget), COLD)
            optimal += agrees(solution, optimum, (seed, budget))
            proven += solution.status is (Status.INFEASIBLE if optimum is None else Status.OPTIMAL)
            total += 1
    assert total == 53
    assert optimal >= 50 and proven >= 48


def test_a_full_second_memory() -> None:
    """What it holds at one time is counted: less room in it is never quicker, and the optimum is met."""
    graph, costs = chain(3, times=(5, 3, 4, 6, 2, 5))
    budget = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes - 4
    times = []
    for room in (0, 3, 4, 8, None):
        memory = replace(memory_like(costs, 40), capacity_bytes=room)
        within = replace(costs, second_memory=memory)
        solution = solve(Problem(graph, within, budget), COLD)
        assert solution.time_ns == brute_force_moves(graph, within, budget)
        assert solution.status is Status.OPTIMAL
        times.append(solution.time_ns)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_longer_chains_are_solved(share: float) -> None:
    """Never above what is searched for, and proven."""
    graph, costs = chain(8, times=tuple(3 + 5 * i % 7 for i in range(16)))
    costs = replace(costs, second_memory=memory_like(costs, 60))
    problem = Problem(graph, costs, int(share * simulate(graph, costs, keep_all_schedule(graph)).peak_bytes))
    solution = solve(problem, "checkmate")
    assert solution.status is Status.OPTIMAL
    assert solution.time_ns <= solve(problem, "auto{effort=1}").time_ns
    assert solution.time_ns <= solve(replace(problem, costs=replace(costs, second_memory=None)), "checkmate").time_ns


def test_too_large_a_graph_is_left_to_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "MOVING_UP_TO", 10)
    graph, costs = chain(5)
    problem = Problem(graph, replace(costs, second_memory=memory_like(costs, 60)), 20)
    assert formulate(problem) is None
    warm, solution = solve(problem, "auto{effort=1}"), solve(problem, "checkmate{time-limit=5}")
    assert solution.time_ns <= warm.time_ns
    assert (solution.lower_bound_ns or 0) >= (warm.lower_bound_ns or 0)


def test_the_lowest_peak_without_transfers_proves_nothing_about_those() -> None:
    graph, costs = chain(4)
    problem = Problem(graph, replace(costs, second_memory=memory_like(costs, 60)), 10**6)
    solution = solve(problem, "checkmate{objective=peak}")
    assert solution.status is Status.FEASIBLE
    below = solve(replace(problem, budget_bytes=solution.peak_bytes - 1), "checkmate{objective=peak}")
    assert below.status is Status.UNSOLVED

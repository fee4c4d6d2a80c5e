"""``dtr`` against brute force, and what an online heuristic must hold to."""

from __future__ import annotations

import pytest

from lowtide.errors import PlanError
from lowtide.eviction import HEURISTICS
from lowtide.ir import keep_all_schedule, simulate
from lowtide.solve import Problem, Status, get_planner, solve
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph
from tests.support.random_graphs import random_graph


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_never_below_the_optimum(heuristic: str) -> None:
    for seed in range(25):
        graph, costs = small_graph(seed, 5 + seed % 3)
        top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        least = brute_force(graph, costs, None)
        assert least is not None
        for budget in {least - 1, least, (least + top) // 2, top}:
            optimum = brute_force(graph, costs, budget)
            solution = solve(Problem(graph, costs, budget), f"dtr{{heuristic={heuristic}}}")
            if solution.status.solved:
                assert optimum is not None and solution.time_ns >= optimum
            else:
                assert solution.minimum_bytes is not None and solution.minimum_bytes > budget


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_the_minimum_is_reachable(heuristic: str) -> None:
    spec = f"dtr{{heuristic={heuristic}}}"
    for seed in range(4):
        graph, costs = random_graph(seed, 40)
        solution = solve(Problem(graph, costs, graph.fixed_bytes + 1), spec)
        assert solution.status is Status.UNSOLVED and solution.minimum_bytes is not None
        assert solve(Problem(graph, costs, solution.minimum_bytes), spec).status.solved


def test_enough_memory_recomputes_nothing() -> None:
    graph, costs = random_graph(1, 60)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    solution = solve(Problem(graph, costs, 2 * top), "dtr")
    assert solution.time_ns == simulate(graph, costs, keep_all_schedule(graph)).time_ns


@pytest.mark.parametrize("spec", ["dtr", "dtr{heuristic=random}", "dtr{sample=true}"])
def test_the_same_seed_gives_the_same_schedule(spec: str) -> None:
    graph, costs = chain(30)
    problem = Problem(graph, costs, 4 * 24, seed=7)
    first = solve(problem, spec)
    assert first.status.solved
    assert first.schedule == solve(problem, spec).schedule


def test_a_chain_at_a_root_of_its_memory() -> None:
    """The theorem of the paper: N ops in memory of the order of root N take of the order of N computes.

    No more of them than ever: 1.23, 1.33 and 1.37 times the 2 N of the program.
    """
    for length, computes in ((64, 157), (144, 381), (256, 701)):
        graph, costs = chain(length)
        budget = 4 * (4 * int(length**0.5) + 4)
        solution = solve(Problem(graph, costs, budget), "dtr{heuristic=dtr}")
        assert solution.status.solved
        assert solution.time_ns <= computes


def test_unknown_heuristic() -> None:
    with pytest.raises(PlanError, match="heuristic is clock, but must be one of dtr-eq, dtr,"):
        get_planner("dtr{heuristic=clock}")

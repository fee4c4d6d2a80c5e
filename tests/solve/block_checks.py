"""What holds for every block planner."""

from __future__ import annotations

import dataclasses

from lowtide.ir import Costs, Graph, keep_all_schedule, simulate
from lowtide.solve import Problem, Solution, solve
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import small_graph


def assert_never_below_the_optimum(spec: str, seed: int) -> None:
    graph, costs = small_graph(seed)
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    solved = 0
    for budget in range(max(peak - 8, 1), peak + 1, 2):
        solution = solve(Problem(graph, costs, budget), spec)
        if solution.status.solved:
            optimum = brute_force(graph, costs, budget)
            assert optimum is not None
            assert solution.time_ns >= optimum
            assert solution.peak_bytes <= budget
            solved += 1
    assert solved


def assert_more_budget_is_never_slower(spec: str, graph: Graph, costs: Costs) -> None:
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    times = []
    for share in range(20, 101, 8):
        solution = solve(Problem(graph, costs, peak * share // 100), spec)
        if solution.status.solved:
            times.append(solution.time_ns)
    assert times
    assert times == sorted(times, reverse=True)
    assert solve(Problem(graph, costs, peak), spec).time_ns == costs.time_ns.sum()


def assert_minimum_is_reached(spec: str, graph: Graph, costs: Costs) -> None:
    unsolved = solve(Problem(graph, costs, 1), spec)
    assert not unsolved.status.solved
    assert unsolved.minimum_bytes is not None
    assert solve(Problem(graph, costs, unsolved.minimum_bytes), spec).status.solved


def assert_scale_does_not_matter(spec: str, graph: Graph, costs: Costs, share: float) -> None:
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    plain = _solve(spec, graph, costs, int(share * peak))
    slower = dataclasses.replace(costs, time_ns=costs.time_ns * 7)
    assert _solve(spec, graph, slower, int(share * peak)).schedule == plain.schedule


def _solve(spec: str, graph: Graph, costs: Costs, budget: int) -> Solution:
    return solve(Problem(graph, costs, budget), spec)

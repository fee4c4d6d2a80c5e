"""Linear relaxation and rounding: never better than the optimum, always within the budget."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lowtide.errors import PlanError
from lowtide.ir import keep_all_schedule, simulate
from lowtide.solve import Problem, Status, get_planner, solve
from lowtide.solve.checkmate_approx import completed
from lowtide.solve.milp.stages import StageModel
from lowtide.solve.model.compact import compact
from lowtide.solve.search.portfolio import make_portfolio
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph

pytest.importorskip("highspy")

ROUNDINGS = ("deterministic", "sweep", "randomised")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_never_better_than_the_optimum(rounding: str) -> None:
    solved = total = 0
    for seed in range(40):
        graph, costs = small_graph(seed, 6)
        top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        least = brute_force(graph, costs, None)
        assert least is not None
        for budget in {least - 1, least, (least + top) // 2}:
            optimum = brute_force(graph, costs, budget)
            solution = solve(Problem(graph, costs, budget), f"checkmate-approx{{rounding={rounding},samples=10}}")
            total += optimum is not None
            solved += solution.status.solved
            if solution.status.solved:
                assert optimum is not None and solution.time_ns >= optimum and solution.peak_bytes <= budget
            else:
                assert solution.status is Status.UNSOLVED
                assert solution.minimum_bytes is not None and solution.minimum_bytes > budget
    assert solved >= 0.9 * total


def test_what_it_calls_reachable_it_reaches() -> None:
    for seed in range(30):
        graph, costs = small_graph(seed, 7)
        problem = Problem(graph, costs, (brute_force(graph, costs, None) or 0) - 1)
        unsolved = solve(problem, "checkmate-approx")
        assert unsolved.minimum_bytes is not None
        again = solve(dataclasses.replace(problem, budget_bytes=unsolved.minimum_bytes), "checkmate-approx")
        assert again.status.solved


def test_any_rounding_gives_a_sequence_that_recomputes_what_it_drops() -> None:
    draw = np.random.default_rng(0)
    for seed in range(40):
        graph, costs = small_graph(seed, 8)
        portfolio = make_portfolio(graph, costs, 0)
        formulation = StageModel(compact(graph, costs), 100, reduced=bool(seed % 2)).build()
        for chance in (0.0, 0.5, 1.0):
            rounded = (draw.random(len(formulation.program.cost)) < chance).astype(float)
            (found,) = portfolio.measure([completed(formulation, rounded)])
            result = simulate(graph, costs, portfolio.schedule(found))
            assert result.peak_bytes <= found.peak_bytes
            if chance == 1.0:
                assert result.time_ns == simulate(graph, costs, keep_all_schedule(graph)).time_ns


def test_a_chain_is_solved_by_every_rounding_with_a_fixed_reserve() -> None:
    graph, costs = chain(10)
    for rounding in ROUNDINGS:
        spec = f"checkmate-approx{{rounding={rounding},reserve=0.1}}"
        solution = solve(Problem(graph, costs, 40), spec)
        assert solution.status is Status.FEASIBLE and solution.peak_bytes <= 40
        assert solution == dataclasses.replace(
            solve(Problem(graph, costs, 40), spec), solve_seconds=solution.solve_seconds
        )


@pytest.mark.parametrize("option", ["rounding=up", "reserve=1", "reserve=-0.1", "samples=0", "time-limit=0"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(PlanError, match="checkmate-approx"):
        get_planner(f"checkmate-approx{{{option}}}")

"""Checkmate's programs against every schedule of tiny graphs, and on published instances."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import PlanError
from lowtide.ir import keep_all_schedule, load_instance, simulate
from lowtide.solve import Problem, Status, get_planner, solve
from lowtide.solve.checkmate import Checkmate
from lowtide.solve.milp.linear import Outcome, ProgramBuilder, SolverOptions, solve_program
from lowtide.solve.milp.stages import StageModel
from lowtide.solve.model.compact import compact
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph
from tests.support.wide import is_wide, seeds

pytest.importorskip("highspy")

FOLDER = Path(os.environ.get("LOWTIDE_INSTANCES", Path(__file__).parents[3] / "shared" / "instances"))
published = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published instances in {FOLDER}")
COLD = "checkmate{form=full,warm-start=false}"


def budgets(seed: int, ops: int) -> list[int]:
    """Just below the least peak, at it, and halfway to the peak without recomputation."""
    graph, costs = small_graph(seed, ops)
    least = brute_force(graph, costs, None)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    assert least is not None
    return sorted({least - 1, least, (least + top) // 2})


def agrees(seed: int, ops: int, planner: str) -> None:
    """The planner's answer is the optimum, proven, or proven not to exist."""
    graph, costs = small_graph(seed, ops)
    for budget in budgets(seed, ops):
        optimum = brute_force(graph, costs, budget)
        solution = solve(Problem(graph, costs, budget), planner)
        if optimum is None:
            assert solution.status is Status.INFEASIBLE and solution.schedule is None, (seed, budget)
            assert solution.minimum_bytes is not None and solution.minimum_bytes > budget
        else:
            assert solution.status is Status.OPTIMAL, (seed, budget)
            assert solution.time_ns == solution.lower_bound_ns == optimum, (seed, budget)
            assert solution.peak_bytes <= budget


@pytest.mark.parametrize("first", range(0, seeds(100, 300).stop, 50))
def test_the_full_form_equals_brute_force(first: int) -> None:
    for seed in range(first, first + 50):
        agrees(seed, 5 + seed % 3, COLD)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_the_full_form_equals_brute_force_on_eight_operators(first: int) -> None:
    for seed in range(first, first + 30):
        agrees(seed, 8, COLD)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_the_full_form_equals_brute_force_on_chains(length: int) -> None:
    graph, costs = chain(length, times=tuple(1 + 3 * i % 7 for i in range(2 * length)))
    least = brute_force(graph, costs, None)
    assert least is not None
    for budget in range(least - 4, 4 * (length + 2), 4):
        optimum = brute_force(graph, costs, budget)
        solution = solve(Problem(graph, costs, budget), COLD)
        assert solution.status is (Status.INFEASIBLE if optimum is None else Status.OPTIMAL)
        assert optimum is None or solution.time_ns == optimum


def test_the_programs_alone_bracket_the_optimum() -> None:
    """Without the shortest path: any order is never above, ordered never below, and both nearly always equal it."""
    cases = below = above = 0
    for seed in seeds(30, 60):
        graph, costs = small_graph(seed, 6)
        model = compact(graph, costs)
        for budget in budgets(seed, 6):
            optimum = brute_force(graph, costs, budget)
            found: list[float] = []
            for ordered in (False, True):
                formulation = StageModel(model, budget, ordered=ordered).build()
                result = solve_program(formulation.program, SolverOptions())
                infeasible = result.outcome is Outcome.INFEASIBLE
                found.append(float("inf") if infeasible else formulation.lower_bound(result.objective))
            limit = float("inf") if optimum is None else optimum
            assert found[0] <= limit <= found[1], (seed, budget)
            cases, below, above = cases + 1, below + (found[0] < limit), above + (found[1] > limit)
    assert below <= 0.1 * cases and above <= 0.01 * cases


def test_the_least_peak_equals_brute_force() -> None:
    for seed in seeds(40, 100):
        graph, costs = small_graph(seed, 5 + seed % 3)
        least = brute_force(graph, costs, None)
        solution = solve(Problem(graph, costs, 10**6), "checkmate{objective=peak,warm-start=false}")
        assert solution.status is Status.OPTIMAL and solution.peak_bytes == least
        assert least is not None
        below = solve(Problem(graph, costs, least - 1), "checkmate{objective=peak}")
        assert below.status is Status.INFEASIBLE and below.minimum_bytes == least


def test_the_reduced_form_claims_only_what_holds_for_the_full_problem() -> None:
    solved, chosen = 0, seeds(30, 60)
    for seed in chosen:
        graph, costs = small_graph(seed, 6)
        for budget in budgets(seed, 6):
            optimum = brute_force(graph, costs, budget)
            solution = solve(Problem(graph, costs, budget), "checkmate{form=reduced,warm-start=false}")
            if solution.status is Status.OPTIMAL:
                assert solution.time_ns == optimum
            if solution.status is Status.INFEASIBLE:
                assert optimum is None
            if solution.lower_bound_ns is not None and optimum is not None:
                assert solution.lower_bound_ns <= optimum
            solved += solution.status.solved
    assert solved > len(chosen)


def test_scaling_bytes_changes_nothing() -> None:
    for seed in range(20):
        graph, costs = small_graph(seed, 6)
        for factor in (1, 3 * 10**9):
            larger = type(costs)(
                costs.time_ns,
                costs.workspace_bytes * factor,
                costs.storage_bytes * factor,
                costs.rng_state_bytes * factor,
            )
            bare = replace(graph, fixed_bytes=0)
            least = brute_force(bare, larger, None)
            assert least is not None
            solution = solve(Problem(bare, larger, least), COLD)
            assert solution.status is Status.OPTIMAL
            assert solution.time_ns == brute_force(bare, larger, least)


def test_the_warm_start_is_never_worsened() -> None:
    for seed in seeds(5, 20):
        graph, costs = chain(12, times=tuple(1 + (7 * i + seed) % 5 for i in range(24)))
        problem = Problem(graph, costs, 28)
        warm, solution = solve(problem, "auto{effort=1}"), solve(problem, "checkmate{time-limit=0.2}")
        assert warm.status.solved and solution.status.solved
        assert solution.time_ns <= warm.time_ns


def test_too_large_a_graph_is_left_to_the_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.solve.milp.search.MOST_RECOMPUTES", 10)
    graph, costs = chain(12)
    problem = Problem(graph, costs, 28)
    solution = solve(problem, "checkmate")
    assert solution.time_ns == solve(problem, "auto{effort=1}").time_ns
    assert solution.lower_bound_ns is not None and solution.lower_bound_ns <= solution.time_ns


@pytest.mark.parametrize("option", ["form=whole", "objective=size", "time-limit=0", "gap=1", "threads=0", "rows=3"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(PlanError, match="checkmate"):
        get_planner(f"checkmate{{{option}}}")


def test_a_program_without_columns() -> None:
    rows = ProgramBuilder()
    rows.add_row([], [], upper=-1.0)
    assert solve_program(rows.build(), SolverOptions()).outcome is Outcome.INFEASIBLE


@published
def test_optima_and_infeasible_budgets_of_vgg16_are_proven() -> None:
    graph, costs = load_instance(FOLDER / "vgg16_176.json")
    rows = json.loads((FOLDER / "reference_gurobi.json").read_text())["vgg16_176"]["gurobi"]
    for row in rows if is_wide() else rows[2:4]:  # the least that is met, and the most that is not
        solution = solve(Problem(graph, costs, row["budget_bytes"]), "checkmate{warm-start=false,time-limit=300}")
        if row["overhead_percent"] is None:
            assert solution.status is Status.INFEASIBLE
        else:
            assert solution.status is Status.OPTIMAL
            assert 100 * (solution.time_ns / costs.total_time_ns - 1) == pytest.approx(
                row["overhead_percent"], abs=1e-3
            )


@published
@pytest.mark.slow  # the same of small graphs: test_the_least_peak_equals_brute_force
def test_the_least_peak_of_vgg16_is_proven() -> None:
    graph, costs = load_instance(FOLDER / "vgg16_176.json")
    least = Checkmate(time_limit=300.0, form="full", warm_start=False).least_peak(Problem(graph, costs, 0))
    assert least.best is not None and least.bound == least.value
    assert simulate(graph, costs, least.best).peak_bytes == least.value

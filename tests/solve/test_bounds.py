"""Lower bounds: never above what brute force finds, never infeasible where something fits."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from lowtide.errors import PlanError
from lowtide.ir import keep_all_schedule, simulate
from lowtide.solve.auto import Auto
from lowtide.solve.bounds import INFEASIBLE_NS, least_time, peak_bound, prove_time, proven_infeasible, time_bound
from lowtide.solve.bounds.cuts import on_windows
from lowtide.solve.bounds.dual import improve, no_dual
from lowtide.solve.bounds.liveness import liveness
from lowtide.solve.bounds.refine import refine
from lowtide.solve.bounds.relaxation import all_windows, relax
from lowtide.solve.model.compact import compact
from lowtide.solve.model.structure import resident_bytes
from lowtide.solve.problem import Problem, Status
from lowtide.solve.search.memory_paths import least_peak, shortest
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting
from tests.support.wide import seeds


def budgets(least: int, top: int) -> list[int]:
    return sorted({least - 2, least - 1, least, least + 1, (least + top) // 2, top - 1, top})


@pytest.mark.parametrize("first", range(0, seeds(100, 300).stop, 50))
def test_never_above_brute_force(first: int) -> None:
    for seed in range(first, first + 50):
        graph, costs = small_graph(seed, 5 + seed % 3)
        if seed % 3 == 0:
            graph, costs = overwriting(graph, costs, seed)
        model = compact(graph, costs, floor=True)
        least = brute_force(graph, costs, None)
        assert least is not None
        assert peak_bound(model) <= least, seed
        for budget in budgets(least, simulate(graph, costs, keep_all_schedule(graph)).peak_bytes):
            optimum = brute_force(graph, costs, budget)
            if optimum is None:
                continue  # any number bounds nothing at all
            assert not proven_infeasible(model, budget), (seed, budget)
            bound = prove_time(model, budget, effort=2)
            assert least_time(model) <= bound.ns <= bound.refined(2).ns <= optimum, (seed, budget)


@pytest.mark.parametrize("effort", [1, 2, 3, 4])
def test_never_above_the_optimum_of_chains(effort: int) -> None:
    feasible = 0
    for length in (3, 4):
        graph, costs = chain(length, times=tuple(range(3, 3 + 2 * length)))
        model = compact(graph, costs)
        top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        for budget in range(top // 2, top + 1, 2):
            optimum = shortest(model, budget)
            assert optimum is not None
            if optimum.found:  # below, any number bounds nothing at all
                bound = prove_time(model, budget, effort=effort)
                assert least_time(model) <= bound.ns <= bound.refined(effort).ns <= optimum.time_ns, (length, budget)
                feasible += 1
    assert feasible == 8


def test_never_above_the_optimum_of_larger_graphs() -> None:
    compared = 0
    chosen = seeds(30, 60)
    for seed in (1000 + number for number in chosen):
        graph, costs = small_graph(seed, 9)
        if seed % 3 == 0:
            graph, costs = overwriting(graph, costs, seed)
        model, floor = compact(graph, costs), compact(graph, costs, floor=True)
        lowest, top = least_peak(model), simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        if lowest is None:
            continue
        assert peak_bound(floor) <= lowest
        for budget in {lowest, (lowest + top) // 2}:
            optimum = shortest(model, budget)
            if optimum is not None:
                for effort in (3, 4):
                    bound = prove_time(floor, budget, effort=effort)
                    assert bound.ns <= bound.refined(effort).ns <= optimum.time_ns, (seed, budget)
                compared += 1
    assert compared > len(chosen)


def test_equals_the_optimum_where_one_storage_has_to_go() -> None:
    """A chain with one storage too many for the budget: one op runs again, the quickest that helps."""
    graph, costs = chain(4, times=(5, 7, 6, 8, 9, 9, 9, 9))
    model = compact(graph, costs)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    optimum = shortest(model, top - 1)
    assert optimum is not None and optimum.time_ns > least_time(model)
    assert time_bound(model, top - 1) == optimum.time_ns


def test_bound_of_auto_on_longer_chains() -> None:
    for length in (12, 25):
        graph, costs = chain(length)
        model = compact(graph, costs)
        top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
        for share in (0.3, 0.5, 0.8):
            solution = Auto(effort=1).solve(Problem(graph, costs, int(share * top)))
            bound = time_bound(model, int(share * top))
            assert solution.status.solved
            assert least_time(model) < bound <= solution.time_ns


def test_many_cuts_see_operators_that_are_recomputed_several_times() -> None:
    """A chain with room for four storages: most operators have to run three times or more, which three cuts do not see."""
    graph, costs = chain(16)
    model = compact(graph, costs)
    found = Auto(effort=1).solve(Problem(graph, costs, 4 * 4))
    bound = prove_time(model, 4 * 4)
    refined = bound.refined(3)
    assert bound.ns + 8 < refined.ns <= found.time_ns
    assert found.lower_bound_ns is not None and bound.ns < found.lower_bound_ns <= refined.ns
    assert bound.refined(3, bound.ns).ns == bound.ns  # where a schedule is known that is as quick


@pytest.mark.parametrize("others", [(), (1, 14)])
def test_what_is_left_beside_whole_units_is_of_no_use(others: tuple[int, ...]) -> None:
    """Storages of four bytes, some of one: with room for five and a half of them there is room for five."""
    graph, costs = chain(16)
    costs.storage_bytes.flags.writeable = True
    costs.storage_bytes[[*others]] = 1
    model = compact(graph, costs)
    facts = [liveness(model, budget) for budget in (5 * 4, 5 * 4 + 2)]
    windows = all_windows([14, 17, 20, 24], model.nodes)
    exactly, above = (on_windows(one, None, windows, 100_000_000).dual.bound for one in facts)
    assert above > exactly - (1e-4 if not others else 1e-2)


def test_a_split_begins_at_the_bound_before_it() -> None:
    """The multipliers of some windows prove as much for the windows that their gaps are split into."""
    graph, costs = chain(12)
    model = compact(graph, costs)
    facts = liveness(model, 7 * 4)
    coarse = on_windows(facts, None, all_windows([12, 16], model.nodes), 10_000_000)
    halves = {(12, 16): ((12, 14), (14, 16)), (16, 25): ((16, 19), (19, 25)), (14, 19): ((14, 16), (16, 19))}
    gaps = {part: () for window in halves.values() for part in window}
    for windows in (all_windows([12, 14, 16, 19], model.nodes), {**coarse.program.windows, **gaps, **halves}):
        assert on_windows(facts, coarse, windows, 0, 0).dual.bound >= coarse.dual.bound - 1e-9
    levels = [refine(facts, coarse, resident_bytes(model)[1], cuts, 10_000_000, 1.0).dual.bound for cuts in (2, 3, 6)]
    assert coarse.dual.bound == levels[0] and all(more >= less - 1e-9 for less, more in itertools.pairwise(levels))


def test_a_smaller_budget_never_lowers_the_bound_of_fixed_cuts() -> None:
    graph, costs = chain(10)
    model = compact(graph, costs)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    shares = []
    for budget in range(top // 3, top, 4):
        program = relax(liveness(model, budget), all_windows([10], model.nodes))
        shares.append(improve(program, no_dual(program), 20_000).bound)
    assert all(more <= less + 1e-6 for less, more in zip(shares, shares[1:], strict=False))
    assert shares[0] > shares[-1]


def test_any_multipliers_prove_a_bound() -> None:
    """Random multipliers are bad ones, but what they prove is never above what the best ones prove."""
    graph, costs = chain(8)
    model = compact(graph, costs)
    budget = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes // 2
    program = relax(liveness(model, budget), all_windows([8, 10], model.nodes))
    best = improve(program, no_dual(program), 20_000)
    draw = np.random.default_rng(0)
    for _ in range(50):
        start = best._replace(y=draw.random(len(program.right)) * draw.choice((0.01, 0.1, 1.0)))
        assert improve(program, start, 1).bound <= best.bound + 1e-4


def test_scaling_bytes_changes_nothing() -> None:
    for seed in range(20):
        graph, costs = small_graph(seed, 7)
        larger = dataclasses.replace(
            costs,
            workspace_bytes=costs.workspace_bytes * 1024,
            storage_bytes=costs.storage_bytes * 1024,
            rng_state_bytes=costs.rng_state_bytes * 1024,
        )
        bare = dataclasses.replace(graph, fixed_bytes=0)
        budget = simulate(bare, costs, keep_all_schedule(bare)).peak_bytes - 2
        small, large = compact(bare, costs), compact(bare, larger)
        assert time_bound(small, budget, effort=1) == time_bound(large, budget * 1024, effort=1)


def test_no_budget_asks_for_nothing() -> None:
    for seed in range(30):
        model = compact(*small_graph(seed, 7))
        assert time_bound(model, 10**9) == least_time(model)


def test_infeasible_budgets() -> None:
    graph, costs = chain(5)
    model = compact(graph, costs)
    bound = peak_bound(model)
    assert proven_infeasible(model, bound - 1)
    assert time_bound(model, bound - 1) == INFEASIBLE_NS
    assert not proven_infeasible(model, bound)
    assert Auto(effort=1).solve(Problem(graph, costs, bound - 1)).status is not Status.FEASIBLE


def test_stops_at_a_known_time() -> None:
    graph, costs = chain(10)
    model = compact(graph, costs)
    budget = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes // 2
    full = time_bound(model, budget)
    assert least_time(model) < time_bound(model, budget, known_ns=least_time(model) + 1) <= full


def test_models_that_only_bound_the_bytes_get_trivial_bounds() -> None:
    model = compact(*chain(5))._replace(bounding=False)
    assert time_bound(model, 1) == least_time(model)
    assert peak_bound(model) == model.fixed_bytes


@pytest.mark.parametrize("effort", [0, 6])
def test_effort_out_of_range(effort: int) -> None:
    with pytest.raises(PlanError, match="1 to 5"):
        time_bound(compact(*chain(3)), 100, effort=effort)


def test_same_answer_every_time() -> None:
    graph, costs = chain(12)
    model = compact(graph, costs)
    assert len({time_bound(model, 100) for _ in range(3)}) == 1

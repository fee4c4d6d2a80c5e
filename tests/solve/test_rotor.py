"""The block table against all memory-persistent schedules, and the planner on top of it."""

from __future__ import annotations

import pytest

from lowtide.errors import PlanError
from lowtide.ir import keep_all_schedule, simulate
from lowtide.solve import Problem, Status, get_planner, solve
from lowtide.solve.block_programs import Rotor
from lowtide.solve.blocks.chain import make_chain
from lowtide.solve.model.compact import compact
from lowtide.solve.model.sweep import sweep
from tests.solve.block_chains import best_persistent_ns, draw_chain
from tests.support.wide import seeds


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_the_exact_table_is_the_best_persistent_schedule(seed: int) -> None:
    blocks = draw_chain(seed, 1 + seed % 7)
    graph, costs = blocks.graph()
    chain = make_chain(compact(graph, costs), blocks.cuts())
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes + 8
    table = Rotor(slots=0, trim=False).table(chain, peak)
    for budget in range(1, peak + 1):
        assert table.time_ns(budget) == best_persistent_ns(blocks, budget), budget


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_one_table_answers_every_smaller_budget_as_its_own_would(seed: int) -> None:
    blocks = draw_chain(seed, 6)
    graph, costs = blocks.graph()
    chain = make_chain(compact(graph, costs), blocks.cuts())
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes + 8
    table = Rotor(slots=0).table(chain, peak)
    for budget in range(4, peak, 3):
        assert table.time_ns(budget) == Rotor(slots=0).table(chain, budget).time_ns(budget)


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_sequences_keep_what_the_table_promises(seed: int) -> None:
    blocks = draw_chain(seed, 7)
    graph, costs = blocks.graph()
    model = compact(graph, costs)
    chain = make_chain(model, blocks.cuts())
    table = Rotor(slots=0).table(chain, 80)
    least = table.least_slots()
    assert least is not None
    forward_ns = sum(blocks.inner_ns) + sum(blocks.outer_ns)
    for slots in range(least, 81, 5):
        _, recompute_ns, peak = sweep(model, table.codes(slots))
        assert peak <= slots
        assert recompute_ns + forward_ns <= int(table.best_ns[0, chain.blocks, slots])


def test_the_trimmed_recurrence_is_never_slower() -> None:
    for seed in range(10):
        blocks = draw_chain(seed, 7)
        chain = make_chain(compact(*blocks.graph()), blocks.cuts())
        plain, trimmed = (Rotor(slots=0, trim=trim).table(chain, 60) for trim in (False, True))
        assert (trimmed.best_ns[0, 7] <= plain.best_ns[0, 7]).all()


def test_a_long_chain_under_a_small_budget_is_solved() -> None:
    blocks = draw_chain(3, 40)
    graph, costs = blocks.graph()
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    solution = solve(Problem(graph, costs, int(0.25 * peak)), "rotor")
    assert solution.status is Status.FEASIBLE
    assert solution.peak_bytes <= 0.25 * peak


@pytest.mark.parametrize("spec", ["rotor{slots=-1}", "rotor{slots=5001}", "rotor{blocks=0}"])
def test_options_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(PlanError, match="write for instance"):
        get_planner(spec)


def test_an_exact_table_that_is_too_large_is_refused_by_name_of_the_option() -> None:
    blocks = draw_chain(0, 7)
    chain = make_chain(compact(*blocks.graph()), blocks.cuts())
    with pytest.raises(PlanError, match="slots=500"):
        Rotor(slots=0).table(chain, 10**9)

"""Binomial checkpointing: the closed form against the recurrence, sequences against the closed form."""

from __future__ import annotations

import functools
import math

import pytest

from lowtide.ir import Compute, keep_all_schedule, simulate
from lowtide.solve import Problem, Status, solve
from lowtide.solve.griewank import next_slot, reversal, slot_sequence, states_of
from lowtide.solve.model.checkpoints import make_readers
from lowtide.solve.model.compact import compact
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain


@functools.cache
def by_recurrence(steps: int, slots: int) -> int:
    """t(l, s) as a minimum over the place of the next stored state."""
    if slots == 1 or steps == 1:
        return steps * (steps - 1) // 2
    return min(m + by_recurrence(steps - m, slots - 1) + by_recurrence(m, slots) for m in range(1, steps))


def binomial_formula(steps: int, slots: int) -> int:
    """r l - beta(s + 1, r - 1) with beta(s, r - 1) < l <= beta(s, r), written out anew."""
    repeats = next(r for r in range(steps + 1) if steps <= math.comb(slots + r, slots))
    return repeats * steps - (math.comb(slots + repeats, slots + 1) if repeats > 0 else 0)


def test_closed_form_solves_the_recurrence() -> None:
    for steps in range(1, 61):
        for slots in range(1, steps + 2):
            assert binomial_formula(steps, slots) == by_recurrence(steps, slots)
            if steps > 1 and slots > 1:
                m = next_slot(steps, slots)
                rest = by_recurrence(steps - m, slots - 1) + by_recurrence(m, slots)
                assert m + rest == by_recurrence(steps, slots)


@pytest.mark.parametrize("length", [*range(1, 30), 48, 64, 99, 100, 128, 150, 199, 200])
def test_recomputes_on_unit_chains_equal_the_binomial_formula(length: int) -> None:
    readers = make_readers(compact(*chain(length)))
    states = states_of(readers.model)
    assert len(states) == length - 1
    for slots in range(1, length + 1):
        recomputes = int((slot_sequence(readers, states, slots) < 0).sum())
        assert recomputes == binomial_formula(length, slots) - (length - 1)


def test_no_more_states_are_stored_than_there_are_slots() -> None:
    for steps in (1, 2, 9, 40):
        for slots in range(1, steps + 1):
            stored: set[int] = set()
            reversed_steps = []
            for kind, index in reversal(steps, slots):
                if kind == "reverse":
                    reversed_steps.append(index)
                elif kind == "store":
                    stored.add(index)
                else:
                    stored.remove(index)
                assert len(stored) < slots
            assert reversed_steps == list(range(steps - 1, -1, -1)) and not stored


def test_golden_schedule_of_a_short_chain() -> None:
    graph, costs = chain(5)  # holds ops 1, 3 and 4 across the boundary
    schedule = solve(Problem(graph, costs, 16), "griewank").schedule
    assert schedule is not None
    computes = [step.op for step in schedule.steps if isinstance(step, Compute)]
    assert computes == GOLDEN


GOLDEN = [0, 1, 2, 3, 4, 5, 2, 6, 7, 0, 8, 9]


def test_peak_grows_with_the_logarithm_of_the_length() -> None:
    for length in (50, 100, 200):
        graph, costs = chain(length, size=1)
        slots = max(length.bit_length(), 2)
        solution = solve(Problem(graph, costs, slots + 3), "griewank")
        assert solution.status is Status.FEASIBLE
        plain = simulate(graph, costs, keep_all_schedule(graph))
        assert solution.time_ns <= plain.time_ns + length * length.bit_length()


@pytest.mark.parametrize("length", [2, 3, 4])
def test_optimal_on_tiny_unit_chains(length: int) -> None:
    graph, costs = chain(length)
    for budget in range(0, 4 * (length + 3), 4):
        optimum = brute_force(graph, costs, budget)
        solution = solve(Problem(graph, costs, budget), "griewank")
        assert (solution.time_ns if solution.status.solved else None) == optimum

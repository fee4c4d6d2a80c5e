"""Recombined sequences: valid, made of their parents, and the same for the same random numbers."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.ir import check
from lowtide.solve.model.compact import Indices
from lowtide.solve.model.sweep import Candidate
from lowtide.solve.search.anneal import make_state
from lowtide.solve.search.portfolio import make_portfolio
from lowtide.solve.search.recombine import children, crossed, survivors
from tests.solve.sequences import with_recomputes
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds


def stretches(codes: Indices) -> list[list[int]]:
    """The recomputes before each first compute."""
    rows: list[list[int]] = [[]]
    for code in codes.tolist():
        if code < 0:
            rows[-1].append(code)
        else:
            rows.append([])
    return rows[:-1]


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_a_mixture_is_a_schedule_made_of_one_stretch_of_the_other(seed: int) -> None:
    graph, costs = random_graph(seed, 40)
    portfolio = make_portfolio(graph, costs, 0)
    first, second = portfolio.measure(with_recomputes(portfolio.model, number) for number in (seed, seed + 1000))
    codes = crossed(first, second, make_state(seed))
    assert codes[codes >= 0].tolist() == list(range(portfolio.model.nodes + 1))
    check(graph, portfolio.schedule(portfolio.measure([codes])[0]))
    ours, theirs, mixed = (stretches(each) for each in (first.codes, second.codes, codes))
    differing = [node for node in range(len(ours)) if ours[node] != theirs[node]]
    taken = [node for node in differing if mixed[node] == theirs[node]]
    assert all(mixed[node] == ours[node] for node in range(len(ours)) if node not in taken)
    if len(differing) > 1:
        assert 1 <= len(taken) < len(differing)
        assert taken == differing[differing.index(taken[0]) :][: len(taken)]


def test_equal_parents_have_their_like_and_a_single_one_itself() -> None:
    portfolio = make_portfolio(*random_graph(3, 40), 0)
    parent = portfolio.measure([with_recomputes(portfolio.model, 3)])[0]
    assert np.array_equal(crossed(parent, parent, make_state(0)), parent.codes)
    assert all(np.array_equal(child, parent.codes) for child in children([parent], 3, make_state(0)))


def test_children_follow_from_the_random_numbers() -> None:
    portfolio = make_portfolio(*random_graph(5, 60), 0)
    population = portfolio.measure(with_recomputes(portfolio.model, number) for number in range(4))
    once, again = (children(population, 6, make_state(7)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


def test_survivors_are_the_quickest_each_time_once() -> None:
    codes = np.zeros(0, np.int32)
    candidates = [Candidate(codes, time, peak) for time, peak in ((5, 2), (3, 9), (5, 1), (4, 4), (3, 8))]
    assert [(c.recompute_ns, c.peak_bytes) for c in survivors(candidates, 2)] == [(3, 8), (4, 4)]
    assert len(survivors(candidates, 9)) == 3

"""The timeline under random moves against the sweep, and its profile against plain arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lowtide.ir import Costs, Graph
from lowtide.native import core
from lowtide.solve.model.compact import encode_keep_all
from lowtide.solve.model.sweep import sweep
from lowtide.solve.search.anneal import make_state
from lowtide.solve.search.portfolio import Portfolio, make_portfolio
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds

BLOCK = 64  # slots whose largest value the profile keeps


def make_timeline(portfolio: Portfolio, length: int, seed: int) -> core.Timeline:
    """Of the program as written."""
    line = core.Timeline(portfolio.model, portfolio.classes, length, 12, make_state(seed))
    line.load(encode_keep_all(portfolio.model))
    return line


def assert_every_move_is_exact(graph: Graph, costs: Costs, seed: int, moves: int, lowering: bool = False) -> int:
    """Moves that changed something; every third is taken back."""
    portfolio = make_portfolio(graph, costs, 0)
    line = make_timeline(portfolio, 3 * portfolio.model.nodes + 4, seed)
    rejected, changed = False, 0
    for move in range(moves):
        changed += line.next_move(rejected, (move % 3) * 128, lowering)
        rejected = move % 3 == 0
        codes = line.codes()
        swept = sweep(portfolio.model, codes)
        assert len(swept.codes) == len(codes)
        assert swept.recompute_ns == line.recompute_ns
        assert swept.peak_bytes == line.profile.peak
        if move % 40 == 39 and not rejected:  # spread anew
            line.load(codes)
            assert swept.peak_bytes == line.profile.peak
    return changed


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_moves_on_small_graphs(seed: int) -> None:
    assert_every_move_is_exact(*small_graph(seed, 8), seed, 120)


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_moves_on_graphs_that_overwrite(seed: int) -> None:
    """Often, and several storages at once: an operator may end the lives of all that it reads."""
    assert_every_move_is_exact(*overwriting(*small_graph(seed, 8), seed, often=1.0), seed, 120)
    assert_every_move_is_exact(*overwriting(*random_graph(seed, 40), seed, often=1.0), seed, 200)


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_moves_on_larger_graphs(seed: int) -> None:
    assert assert_every_move_is_exact(*random_graph(seed, 40), seed, 200) > 20


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_moves_that_lower_the_peak(seed: int) -> None:
    assert assert_every_move_is_exact(*random_graph(seed, 40), seed, 200, lowering=True) > 20
    assert_every_move_is_exact(*overwriting(*small_graph(seed, 8), seed, often=1.0), seed, 120, lowering=True)


def test_moves_on_a_chain_with_repeats() -> None:
    assert assert_every_move_is_exact(*chain(40), 0, 600) > 100


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_a_rejected_move_leaves_no_trace(seed: int) -> None:
    graph, costs = random_graph(seed, 30)
    portfolio = make_portfolio(graph, costs, 0)
    line = make_timeline(portfolio, 200, seed)
    for _ in range(50):
        line.next_move(False, 256, False)
    before, bytes_before = line.codes(), line.profile.values()
    time_before = line.recompute_ns
    line.next_move(False, 256, False)
    while line.next_move(True, 256, False):
        pass  # the first that comes to nothing has taken back the one before and done nothing itself
    assert line.codes().tolist() == before.tolist()
    assert line.recompute_ns == time_before
    np.testing.assert_array_equal(line.profile.values(), bytes_before)


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_profile_against_an_array(seed: int) -> None:
    draw = random.Random(seed)
    profile = core.Profile(10 * BLOCK)
    plain = np.zeros(10 * BLOCK, np.int64)
    for _ in range(200):
        first, last = draw.randrange(len(plain)), draw.randrange(len(plain))
        amount = draw.randint(-5, 9)
        profile.add(first, last, amount)
        plain[first : last + 1] += amount
        blocks = plain.reshape(-1, BLOCK).max(axis=1)
        assert profile.peak == max(plain.max(), 0)
        assert plain[profile.peak_slot] == plain.max()
        over = np.maximum(blocks - 7, 0)
        assert profile.excess(7) == (over.max(), over.sum())

"""The timeline under random moves against the sweep, and its profile against plain arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lowtide.ir import Costs, Graph
from lowtide.solve.model.compact import encode_keep_all
from lowtide.solve.model.sweep import sweep
from lowtide.solve.search.moves import next_move
from lowtide.solve.search.portfolio import make_portfolio
from lowtide.solve.search.profile import BLOCK, add_range, excess_of, make_profile, peak_of
from lowtide.solve.search.timeline import RECOMPUTE_NS, codes_of, load, make_timeline
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph


def assert_every_move_is_exact(graph: Graph, costs: Costs, seed: int, moves: int) -> int:
    """Moves that changed something; every third is taken back."""
    portfolio = make_portfolio(graph, costs, 0)
    tables = portfolio.model
    line = make_timeline(tables, 3 * portfolio.model.nodes + 4, 12, seed)
    load(tables, line, encode_keep_all(portfolio.model))
    rejected, changed = False, 0
    for move in range(moves):
        changed += next_move(tables, portfolio.classes, line, rejected, (move % 3) * 128)
        rejected = move % 3 == 0
        codes = codes_of(line)
        swept = sweep(tables, codes)
        assert len(swept.codes) == len(codes)
        assert swept.recompute_ns == line.totals[RECOMPUTE_NS]
        assert swept.peak_bytes == peak_of(line.profile)
        if move % 40 == 39 and not rejected:  # spread anew
            load(tables, line, codes)
            assert swept.peak_bytes == peak_of(line.profile)
    return changed


@pytest.mark.parametrize("seed", range(60))
def test_moves_on_small_graphs(seed: int) -> None:
    assert_every_move_is_exact(*small_graph(seed, 8), seed, 120)


@pytest.mark.parametrize("seed", range(60))
def test_moves_on_graphs_that_overwrite(seed: int) -> None:
    """Often, and several storages at once: an operator may end the lives of all that it reads."""
    assert_every_move_is_exact(*overwriting(*small_graph(seed, 8), seed, often=1.0), seed, 120)
    assert_every_move_is_exact(*overwriting(*random_graph(seed, 40), seed, often=1.0), seed, 200)


@pytest.mark.parametrize("seed", range(30))
def test_moves_on_larger_graphs(seed: int) -> None:
    assert assert_every_move_is_exact(*random_graph(seed, 40), seed, 200) > 20


def test_moves_on_a_chain_with_repeats() -> None:
    assert assert_every_move_is_exact(*chain(40), 0, 600) > 100


@pytest.mark.parametrize("seed", range(20))
def test_a_rejected_move_leaves_no_trace(seed: int) -> None:
    graph, costs = random_graph(seed, 30)
    portfolio = make_portfolio(graph, costs, 0)
    line = make_timeline(portfolio.model, 200, 12, seed)
    load(portfolio.model, line, encode_keep_all(portfolio.model))
    for _ in range(50):
        next_move(portfolio.model, portfolio.classes, line, False, 256)
    before, bytes_before = codes_of(line), line.profile.inner + np.repeat(line.profile.added, BLOCK)
    time_before = line.totals[RECOMPUTE_NS]
    next_move(portfolio.model, portfolio.classes, line, False, 256)
    while next_move(portfolio.model, portfolio.classes, line, True, 256):
        pass  # the first that comes to nothing has taken back the one before and done nothing itself
    assert codes_of(line).tolist() == before.tolist()
    assert line.totals[RECOMPUTE_NS] == time_before
    np.testing.assert_array_equal(line.profile.inner + np.repeat(line.profile.added, BLOCK), bytes_before)


@pytest.mark.parametrize("seed", range(20))
def test_profile_against_an_array(seed: int) -> None:
    draw = random.Random(seed)
    profile = make_profile(10 * BLOCK)
    plain = np.zeros(10 * BLOCK, np.int64)
    for _ in range(200):
        first, last = draw.randrange(len(plain)), draw.randrange(len(plain))
        amount = draw.randint(-5, 9)
        add_range(profile, first, last, amount)
        plain[first : last + 1] += amount
        blocks = plain.reshape(-1, BLOCK).max(axis=1)
        assert peak_of(profile) == max(plain.max(), 0)
        over = np.maximum(blocks - 7, 0)
        assert excess_of(profile, 7) == (over.max(), over.sum())

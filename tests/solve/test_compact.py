"""The compact model against the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.ir import Costs, Graph, check, schedule_from_sequence, simulate
from lowtide.solve.model.compact import compact
from lowtide.solve.model.tables import decode, encode_keep_all
from lowtide.solve.search.segments import segment_sequences
from tests.solve.sequences import measure, with_recomputes
from tests.solve.small_graphs import chain, small_graph
from tests.support.random_graphs import random_graph


def assert_never_under(graph: Graph, costs: Costs, seed: int) -> None:
    model = compact(graph, costs)
    codes, swept = measure(model, with_recomputes(model, seed))
    schedule = schedule_from_sequence(graph, decode(model, codes))
    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    assert swept.peak_bytes + model.fixed_bytes >= result.peak_bytes
    if model.faithful:
        assert swept.peak_bytes + model.fixed_bytes == result.peak_bytes


@pytest.mark.parametrize("seed", range(150))
def test_small_graphs(seed: int) -> None:
    assert_never_under(*small_graph(seed, 8), seed)


@pytest.mark.parametrize("seed", range(60))
def test_larger_graphs(seed: int) -> None:
    assert_never_under(*random_graph(seed, 40), seed)


def test_unused_recomputes_drop_out() -> None:
    graph, costs = chain(4)
    model = compact(graph, costs)
    codes, swept = measure(model, np.array([0, 1, ~0, 2, 3, 4, 5, 6, 7, 8], np.int32))
    assert codes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8] or (codes < 0).sum() == 1
    assert swept.recompute_ns == int((codes < 0).sum())
    assert measure(model, encode_keep_all(model))[1].recompute_ns == 0


def test_segments_hold_fewer_bytes_on_a_long_chain() -> None:
    graph, costs = chain(64)
    model = compact(graph, costs)
    top = measure(model, encode_keep_all(model))[1].peak_bytes
    swept = [measure(model, codes)[1] for codes in segment_sequences(model)]
    assert min(s.peak_bytes for s in swept) < top / 4
    once = [s for s in swept if s.recompute_ns <= costs.total_time_ns // 2]
    assert min(s.peak_bytes for s in once) < top / 3

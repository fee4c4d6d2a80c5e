"""The compact model against the simulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lowtide.ir import Costs, Graph, check, schedule_from_sequence, simulate
from lowtide.solve.model.compact import compact, decode, encode_keep_all
from lowtide.solve.model.ragged import rows
from lowtide.solve.search.segments import segment_sequences
from tests.solve.sequences import measure, with_recomputes
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds


def assert_never_under(graph: Graph, costs: Costs, seed: int) -> None:
    model = compact(graph, costs)
    codes, swept = measure(model, with_recomputes(model, seed))
    schedule = schedule_from_sequence(graph, decode(model, codes))
    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    assert swept.peak_bytes + model.fixed_bytes >= result.peak_bytes
    exact = compact(graph, costs, floor=True).bounding  # what is overwritten at times, sequences tell
    if exact and len(decode(model, codes)) == len(codes) - 1:
        assert swept.peak_bytes + model.fixed_bytes == result.peak_bytes


@pytest.mark.parametrize("seed", seeds(40, 150))
def test_small_graphs(seed: int) -> None:
    assert_never_under(*small_graph(seed, 8), seed)


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_larger_graphs(seed: int) -> None:
    assert_never_under(*random_graph(seed, 40), seed)


@pytest.mark.parametrize("seed", seeds(40, 150))
def test_graphs_that_overwrite(seed: int) -> None:
    assert_never_under(*overwriting(*small_graph(seed, 8), seed), seed)
    assert_never_under(*overwriting(*random_graph(seed, 40), seed), seed)


def test_recomputes_of_what_could_be_kept_in_the_same_bytes_are_left_out() -> None:
    """Op 1 overwrites what only it reads: computed again from that, it was there all the time."""
    graph, costs = chain(3)
    graph = dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(op, overwrites=op.inputs) if op.id == 5 else op for op in graph.ops)
    )
    model = compact(graph, costs)
    assert model.faithful and rows(model.replaced_start, model.replaced) == [[], [], [], [], [], [4], []]
    assert model.workspace_bytes.tolist() == [0, 0, 0, 0, 0, -4, 0]
    assert model.sequence([0, 1, 2, 3, 4, 5, 5, 3, 4, 5]) == [0, 1, 2, 3, 4, 5, 3, 4, 5]


def test_unused_recomputes_drop_out() -> None:
    graph, costs = chain(4)
    model = compact(graph, costs)
    for given, kept in (
        ([0, 1, ~0, 2, 3, 4, 5, 6, 7, 8], [0, 1, ~0, 2, 3, 4, 5, 6, 7, 8]),  # node 8 reads it
        ([0, 1, ~0, ~0, 2, 3, 4, 5, 6, 7, 8], [0, 1, ~0, 2, 3, 4, 5, 6, 7, 8]),
        ([0, 1, 2, ~1, 3, ~1, 4, 5, 6, 7, 8], [0, 1, 2, 3, ~1, 4, 5, 6, 7, 8]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, ~0], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ):
        codes, swept = measure(model, np.array(given, np.int32))
        assert codes.tolist() == kept
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

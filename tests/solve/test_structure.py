"""Articulation points against their definition, reductions against the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.ir import Costs, Graph, check, schedule_from_sequence, simulate
from lowtide.solve.model.compact import Compact, compact
from lowtide.solve.model.structure import articulation_points, merge_chains
from lowtide.solve.model.tables import decode
from tests.solve.sequences import measure, with_recomputes
from tests.solve.small_graphs import chain, small_graph
from tests.support.random_graphs import random_graph


def reads(model: Compact, node: int) -> set[int]:
    return set(model.reads[model.reads_start[node] : model.reads_start[node + 1]].tolist())


def owns(model: Compact, node: int) -> set[int]:
    return set(model.owns[model.owns_start[node] : model.owns_start[node + 1]].tolist())


def gives(model: Compact, node: int) -> bool:
    """Whether a forward node reads what ``node`` allocates."""
    return any(owns(model, node) & reads(model, reader) for reader in range(model.boundary))


def by_definition(model: Compact) -> list[int]:
    readers = [n for n in range(model.boundary) if model.recomputable[n] or gives(model, n)]
    held = set(np.flatnonzero(model.held).tolist())
    points = []
    for cut in range(model.boundary):
        before = {s for node in range(cut + 1) for s in owns(model, node)}
        crossing = {s for node in readers if node > cut for s in reads(model, node)} & before - held
        if crossing <= owns(model, cut):
            points.append(cut)
    return points


@pytest.mark.parametrize("seed", range(80))
def test_articulation_points_by_definition(seed: int) -> None:
    for graph, costs in (small_graph(seed, 8), random_graph(seed, 30)):
        model = compact(graph, costs)
        assert articulation_points(model) == by_definition(model)


def test_every_node_of_a_chain_is_an_articulation_point() -> None:
    assert articulation_points(compact(*chain(5))) == [0, 1, 2, 3, 4]


def assert_faithful(graph: Graph, costs: Costs, seed: int, exact: bool) -> int:
    """Compare the reduced model with the full one and the simulator; returns the nodes saved."""
    model = compact(graph, costs)
    reduction = merge_chains(model, exact=exact)
    small = reduction.model
    assert [node for group in reduction.members for node in group] == list(range(model.nodes))
    codes, reduced = measure(small, with_recomputes(small, seed))
    expanded, full = measure(model, reduction.expand_codes(codes.tolist()))
    assert len(expanded) == len(reduction.expand_codes(codes.tolist()))
    assert full.peak_bytes == reduced.peak_bytes if exact else full.peak_bytes <= reduced.peak_bytes
    assert int(model.time_ns.sum()) + full.recompute_ns == int(small.time_ns.sum()) + reduced.recompute_ns
    schedule = schedule_from_sequence(graph, decode(model, expanded))
    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    assert result.peak_bytes <= reduced.peak_bytes + model.fixed_bytes
    if model.faithful:
        assert result.time_ns == int(small.time_ns.sum()) + reduced.recompute_ns + small.constant_ns
    nodes = [code if code >= 0 else ~code for code in codes.tolist()]
    assert model.sequence(reduction.expand(nodes)) == decode(model, expanded)
    return model.nodes - small.nodes


@pytest.mark.parametrize("exact", [False, True])
def test_merged_chains_of_small_graphs(exact: bool) -> None:
    saved = sum(assert_faithful(*small_graph(seed, 9), seed, exact) for seed in range(300))
    assert saved > 20


@pytest.mark.parametrize("exact", [False, True])
def test_merged_chains_of_larger_graphs(exact: bool) -> None:
    saved = sum(assert_faithful(*random_graph(seed, 40), seed, exact) for seed in range(80))
    assert saved > 20


def test_a_forward_only_chain_becomes_one_node() -> None:
    graph, costs = chain(4, size=6)
    model = compact(graph, costs)
    reduction = merge_chains(model)
    assert reduction.members == ((0,), (1,), (2,), (3,), (4, 5, 6, 7))  # forward results are read twice
    graph, costs = line(5)
    reduction = merge_chains(compact(graph, costs))
    assert reduction.members == ((0, 1, 2, 3, 4),)
    assert reduction.model.time_ns.tolist() == [5, 0]
    assert reduction.model.workspace_bytes.tolist() == [4, 0]
    assert reduction.model.op_of_node.tolist() == [4]


def line(length: int) -> tuple[Graph, Costs]:
    """Ops in a row without a backward pass, four bytes and one nanosecond each."""
    from lowtide.ir import Op, Phase, Storage, Value

    ops = tuple(Op(i, f"op{i}", "op", (i - 1,) if i else (), (i,), Phase.FORWARD) for i in range(length))
    values = tuple(Value(i, f"v{i}", i, i) for i in range(length))
    storages = tuple(Storage(i, i, (i,)) for i in range(length))
    graph = Graph("line", ops, values, storages, (), (), (length - 1,), length)
    return graph, Costs(np.ones(length, np.int64), np.zeros(length, np.int64), np.full(length, 4))

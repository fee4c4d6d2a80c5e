"""Articulation points against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.solve.model.compact import CompactGraph, compact
from lowtide.solve.model.structure import articulation_points
from tests.solve.small_graphs import chain, small_graph
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds


def reads(model: CompactGraph, node: int) -> set[int]:
    return set(model.reads[model.reads_start[node] : model.reads_start[node + 1]].tolist())


def owns(model: CompactGraph, node: int) -> set[int]:
    return set(model.owns[model.owns_start[node] : model.owns_start[node + 1]].tolist())


def gives(model: CompactGraph, node: int) -> bool:
    """Whether a forward node reads what ``node`` allocates."""
    return any(owns(model, node) & reads(model, reader) for reader in range(model.boundary))


def by_definition(model: CompactGraph) -> list[int]:
    readers = [n for n in range(model.boundary) if model.recomputable[n] or gives(model, n)]
    held = set(np.flatnonzero(model.held).tolist())
    points = []
    for cut in range(model.boundary):
        before = {s for node in range(cut + 1) for s in owns(model, node)}
        crossing = {s for node in readers if node > cut for s in reads(model, node)} & before - held
        if crossing <= owns(model, cut):
            points.append(cut)
    return points


@pytest.mark.parametrize("seed", seeds(20, 80))
def test_articulation_points_by_definition(seed: int) -> None:
    for graph, costs in (small_graph(seed, 8), random_graph(seed, 30)):
        model = compact(graph, costs)
        assert articulation_points(model) == by_definition(model)


def test_every_node_of_a_chain_is_an_articulation_point() -> None:
    assert articulation_points(compact(*chain(5))) == [0, 1, 2, 3, 4]

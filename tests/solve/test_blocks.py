"""Chains of blocks: cutting, regions, equal blocks, and the seeds made from them."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.ir import Costs, Graph, Op, Phase, Storage, Value, keep_all_schedule, simulate
from lowtide.solve.blocks.chain import make_chain, measure_options
from lowtide.solve.blocks.menu import equal_blocks, menus
from lowtide.solve.blocks.partition import articulation_cuts, even_cuts, refined_cuts, top_cuts
from lowtide.solve.blocks.sequences import block_sequences
from lowtide.solve.model.compact import compact
from lowtide.solve.search.portfolio import make_portfolio
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds


def transformer(layers: int, *, mask: bool = True) -> tuple[Graph, Costs]:
    """Layers of four forward ops (norm, attention that reads a mask, its activation, sum with the layer's input) and
    four backward ops, a mask made once, a loss."""
    reads: list[tuple[int, ...]] = [(), ()]  # embedding, mask
    for layer in range(layers):
        x = 4 * layer + 1 if layer else 0
        first = 4 * layer + 2
        reads += [(x,), (first, 1) if mask else (first,), (first + 1,), (x, first + 2)]
    reads.append((len(reads) - 1,))
    forward = len(reads)
    gradient = forward - 1
    for layer in range(layers - 1, -1, -1):
        x = 4 * layer + 1 if layer else 0
        first = 4 * layer + 2
        reads.append((gradient, first + 2))
        reads.append((len(reads) - 1, first + 1))
        reads.append((len(reads) - 1, first, 1) if mask else (len(reads) - 1, first))
        reads.append((len(reads) - 1, gradient, x))
        gradient = len(reads) - 1
    total = len(reads)
    graph = Graph(
        name="transformer",
        ops=tuple(
            Op(i, f"op{i}", "op", tuple(sorted(set(r))), (i,), Phase.FORWARD if i < forward else Phase.BACKWARD)
            for i, r in enumerate(reads)
        ),
        values=tuple(Value(i, f"v{i}", i, i) for i in range(total)),
        storages=tuple(Storage(i, i, (i,)) for i in range(total)),
        inputs=(),
        forward_outputs=(),
        outputs=(total - 1,),
        forward_ops=forward,
    )
    size = np.array([10, 2, *(value for _ in range(layers) for value in (10, 40, 20, 10)), 1])
    bytes_ = np.concatenate([size, np.full(total - forward, 10)])
    return graph, Costs(np.arange(total) % 5 + 1, np.zeros(total, np.int64), bytes_)


def test_a_mask_that_all_blocks_read_does_not_destroy_the_cutting() -> None:
    model = compact(*transformer(12))
    cuts = articulation_cuts(model, 60)
    assert {4 * layer + 2 for layer in range(1, 12)} <= set(cuts)


def test_equal_blocks_are_found_and_solved_once() -> None:
    model = compact(*transformer(12))
    chain = make_chain(model, [0, *(4 * layer + 2 for layer in range(1, 12)), model.boundary])
    groups = equal_blocks(chain)
    assert max(len(group) for group in groups) >= 9
    found = menus(chain, 8)
    alike = max(groups, key=len)
    saved = [measure_options(model, chain.span(i, i + 1), found[i]).saved_bytes.tolist() for i in alike]
    assert all(row == saved[0] for row in saved)


def test_a_shared_value_is_paid_once() -> None:
    model = compact(*transformer(8))
    chain = make_chain(model, [0, *(4 * layer + 2 for layer in range(1, 8)), model.boundary])
    crossing = chain.crossing_bytes()
    assert crossing[0, 5] == 12  # a layer's output and the mask
    assert crossing[3, 5] == 10  # who stores block 3's input has the mask already


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_regions_cover_the_backward_pass_in_order(seed: int) -> None:
    model = compact(*random_graph(seed, 60))
    for cuts in (articulation_cuts(model, 20), even_cuts(model, 6), *top_cuts(model, 8, 3)):
        if len(cuts) < 2 or cuts[-1] == 0:
            continue
        assert cuts == sorted({*cuts}) and cuts[0] == 0 and cuts[-1] == model.boundary
        chain = make_chain(model, cuts)
        regions = [chain.region(i, i + 1) for i in range(chain.blocks)]
        nodes = [node for first, last in reversed(regions) for node in range(first, last)]
        assert nodes == list(range(model.boundary, model.nodes))


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_options_run_each_backward_node_once_and_recompute_only_their_block(seed: int) -> None:
    model = compact(*random_graph(seed, 60))
    chain = make_chain(model, refined_cuts(model, [0, model.boundary], 7))
    for block, menu in enumerate(menus(chain, 8)):
        first, last = chain.region(block, block + 1)
        for codes in menu:
            assert codes[codes >= 0].tolist() == list(range(first, last))
            inside = ~codes[codes < 0]
            assert ((chain.cuts[block] <= inside) & (inside < chain.cuts[block + 1])).all()
            assert model.recomputable[inside].all()


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_seeds_are_valid_sequences(seed: int) -> None:
    graph, costs = random_graph(seed, 80)
    portfolio = make_portfolio(graph, costs, 0)
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    for codes in block_sequences(portfolio.chains, int(0.8 * peak)):
        assert codes[codes >= 0].tolist() == list(range(portfolio.model.nodes + 1))
        candidate = portfolio.measure([codes])[0]
        result = simulate(graph, costs, portfolio.schedule(candidate))
        assert result.peak_bytes <= candidate.peak_bytes


def test_seeds_fit_small_budgets_of_deep_programs() -> None:
    graph, costs = transformer(24)
    portfolio = make_portfolio(graph, costs, 0)
    budget = int(0.15 * portfolio.keep_all().peak_bytes)
    found = portfolio.measure(block_sequences(portfolio.chains, budget))
    assert any(candidate.peak_bytes <= budget for candidate in found)

"""A sequence inside a budget: computed in an order that can be, and of the peak that is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lowtide.ir import Costs, Graph, Op, Phase, Storage, Value, schedule_from_sequence, simulate
from lowtide.solve.minimum import minimum_peak, sequence_within, working_set_bound
from tests.support.random_graphs import random_graph


def _ladder(rungs: int) -> Graph:
    """A chain forward and one back that reads both its predecessor and the forward result at the same height."""
    inputs = [(index - 1,) if index else () for index in range(rungs)]
    inputs += [(rungs + index - 1, rungs - 1 - index) if index else (rungs - 1,) for index in range(rungs)]
    return Graph(
        name="ladder",
        ops=tuple(Op(index, f"op{index}", "op", reads, (index,), Phase.FORWARD) for index, reads in enumerate(inputs)),
        values=tuple(Value(index, f"v{index}", index, index) for index in range(2 * rungs)),
        storages=tuple(Storage(index, index, (index,)) for index in range(2 * rungs)),
        inputs=(),
        forward_outputs=(),
        outputs=(2 * rungs - 1,),
        forward_ops=2 * rungs,
    )


def _costs(graph: Graph) -> Costs:
    ops = len(graph.ops)
    return Costs(np.ones(ops), np.zeros(ops), np.full(ops, 10))


@pytest.mark.parametrize("budget", [400, 200, 120, 80, 60])
def test_within_the_budget(budget: int) -> None:
    graph = _ladder(30)
    costs = _costs(graph)
    peak, sequence = sequence_within(graph, costs, budget)
    assert peak == simulate(graph, costs, schedule_from_sequence(graph, sequence)).peak_bytes <= budget
    made: set[int] = set()
    for op in sequence:
        assert made.issuperset(graph.ops[op].inputs)
        made.add(op)
    assert 59 in made
    assert (peak, sequence) == sequence_within(graph, costs, budget)


def test_a_budget_that_nothing_fits_gives_the_lowest_that_was_met() -> None:
    graph = _ladder(30)
    costs = _costs(graph)
    peak, sequence = sequence_within(graph, costs, 20)
    assert peak == simulate(graph, costs, schedule_from_sequence(graph, sequence)).peak_bytes
    assert 20 < working_set_bound(graph, costs) <= peak <= 100


@pytest.mark.parametrize(
    ("seed", "ops", "times"), [(143, 40, 2), (172, 40, 1), (274, 30, 0), (374, 40, 0), (164, 30, 2)]
)
def test_the_least_budget_is_found_whatever_operators_take(seed: int, ops: int, times: int) -> None:
    """Times of which runs that ask for them end above the least peak, in graphs of a few nodes."""
    graph, costs = random_graph(seed, ops)
    even = replace(costs, time_ns=np.ones_like(costs.time_ns))
    factors = np.random.default_rng(times).choice([0.05, 0.2, 1, 5, 20], len(graph.ops))
    skewed = replace(costs, time_ns=np.maximum(1, (costs.time_ns * factors).astype(np.int64)))
    assert minimum_peak(graph, skewed)[0] <= minimum_peak(graph, even)[0]

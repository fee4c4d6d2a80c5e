"""The search over full memory states equals brute force."""

from __future__ import annotations

import pytest

from lowtide.ir import keep_all_schedule, schedule_from_sequence, simulate
from lowtide.solve.model.compact import compact, released_model
from lowtide.solve.search.memory_paths import cheapest_path
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph


def agrees(seed: int, ops: int) -> None:
    graph, costs = small_graph(seed, ops)
    model = released_model(graph, costs, compact(graph, costs))
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    least = brute_force(graph, costs, None)
    assert least is not None
    for budget in {least - 1, least, (least + top) // 2, top - 1}:
        optimum = brute_force(graph, costs, budget)
        path = cheapest_path(model, budget)
        anyone = cheapest_path(model, budget, any_path=True)
        assert path is not None and anyone is not None
        assert path.found == anyone.found == (optimum is not None)
        if optimum is None:
            continue
        result = simulate(graph, costs, schedule_from_sequence(graph, model.sequence(path.nodes), released=True))
        assert result.time_ns == path.time_ns == optimum and result.peak_bytes <= budget
        below = cheapest_path(model, budget, path.time_ns)
        assert below is not None and not below.found


def test_equals_brute_force() -> None:
    for seed in range(300, 420):
        agrees(seed, 4 + seed % 4)


@pytest.mark.slow
def test_equals_brute_force_on_eight_operators() -> None:
    for seed in range(300, 420):
        agrees(seed, 8)


def test_gives_up_where_there_are_too_many_states() -> None:
    graph, costs = chain(12)
    assert cheapest_path(compact(graph, costs), 28, states=20) is None

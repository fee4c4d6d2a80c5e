"""Greedy eviction against the sweep."""

from __future__ import annotations

from lowtide.native import core
from lowtide.solve.model.compact import compact, encode_keep_all
from tests.solve.sequences import measure
from tests.solve.small_graphs import small_graph
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph


def test_nothing_is_evicted_at_the_peak_of_keeping_everything() -> None:
    """What an operator writes over takes no second memory. Graphs in which all may be freed, where they overwrite at times."""
    models = [compact(*overwriting(*small_graph(seed, 8), seed)) for seed in range(150)]
    models += [compact(*overwriting(*random_graph(seed, 40), seed)) for seed in range(150)]
    models = [model for model in models if len(model.overs) and model.recomputable[:-1].all()]
    assert len(models) > 40
    for model in models:
        program = encode_keep_all(model)
        peak = measure(model, program)[1].peak_bytes
        assert core.greedy_sequence(model, peak, 2 * len(program)).tolist() == program.tolist()

"""Sequences of the greedy planner, one per limit at and below the budget. See ``lowtide.solve.greedy``."""

from __future__ import annotations

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.search.threads import in_threads

LIMITS = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7, 0.6, 0.5)
_STEPS_PER_NODE = 6


def greedy_sequences(model: CompactGraph, budget_bytes: int, limits: int = len(LIMITS)) -> list[Indices]:
    """Encoded sequences, one per limit for which greedy comes to an end."""
    room = max(budget_bytes - model.fixed_bytes, 0)

    def run(limit: float) -> Indices:
        return core.greedy_sequence(model, int(room * limit), _STEPS_PER_NODE * (model.nodes + 1))

    return [codes for codes in in_threads(run, LIMITS[: max(limits, 1)]) if len(codes)]

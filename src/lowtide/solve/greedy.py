"""``greedy``: run the program and, whenever the next operator does not fit, evict the storage that is cheapest to recompute.

The victim is the live storage with the least (time to recompute it, evicted ancestors included) / (bytes x time until its
next use), the score of dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616) with the known
next use in place of staleness. Evicted inputs are recomputed recursively where they are next read.

No guarantee: pinned inputs of a recursive recomputation can exceed the budget. So several smaller limits are tried too, and
the quickest result that fits is the answer, keeping everything included. O(operators x storages) per run.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.options import Options
from lowtide.solve.outcome import quickest_eviction
from lowtide.solve.problem import Problem, Solution
from lowtide.solve.threads import in_threads

_LIMITS = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7, 0.6, 0.5)
_STEPS_PER_NODE = 6
_BRIEF_NODES = 250  # a millisecond or two for all limits


def greedy_sequences(model: CompactGraph, budget_bytes: int, limits: int = len(_LIMITS)) -> list[Indices]:
    """Return encoded sequences, one per limit at and below the budget for which greedy ends; none if it does not end at the
    budget itself."""
    room = max(budget_bytes - model.fixed_bytes, 0)

    def run(limit: float) -> Indices:
        return core.greedy_sequence(model, int(room * limit), _STEPS_PER_NODE * (model.nodes + 1))

    first = run(_LIMITS[0])
    if not len(first):
        return []
    others = in_threads(run, _LIMITS[1 : max(limits, 1)], brief=model.nodes <= _BRIEF_NODES)
    return [first, *(codes for codes in others if len(codes))]


@dataclass(frozen=True, slots=True)
class Greedy(Options):
    """The planner ``greedy``. ``limits``: how many limits at and below the budget are tried."""

    limits: int = len(_LIMITS)

    def search(self, problem: Problem) -> Solution:
        def sequences(model: CompactGraph, budget_bytes: int) -> list[Indices]:
            return greedy_sequences(model, budget_bytes, self.limits)

        return quickest_eviction(self.name, problem, sequences, sequences)

"""``greedy``: run the program and evict, whenever the next operator would not fit, what is cheapest to rebuild.

The victim is the live storage with the least (time to rebuild it, evicted ancestors included) / (bytes x time until its
next use), the score of dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616) with the known
next use in place of staleness. Evicted inputs are rebuilt recursively where they are next read.

No guarantee of any kind: pinned inputs of a recursive rebuild can exceed the budget. It is therefore run against
several smaller limits as well, and the quickest result that fits is the answer, keeping everything included.
O(operators x storages) per run.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.outcome import quickest_eviction
from lowtide.solve.problem import Problem, Solution
from lowtide.solve.search.evictions import LIMITS, greedy_sequences


@dataclass(frozen=True, slots=True)
class Greedy:
    """``limits``: how many limits at and below the budget are tried."""

    limits: int = len(LIMITS)

    def solve(self, problem: Problem) -> Solution:
        def sequences(model: CompactGraph, budget_bytes: int) -> list[Indices]:
            return greedy_sequences(model, budget_bytes, self.limits)

        return quickest_eviction("greedy", problem, sequences, sequences)

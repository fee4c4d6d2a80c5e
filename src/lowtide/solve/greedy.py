"""``greedy``: run the program and evict, whenever the next operator would not fit, what is cheapest to rebuild.

The victim is the live storage with the least (time to rebuild it, evicted ancestors included) / (bytes x time until its
next use), the score of dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616) with the known
next use in place of staleness. Evicted inputs are rebuilt recursively where they are next read.

No guarantee of any kind: pinned inputs of a recursive rebuild can exceed the budget. It is therefore run against
several smaller limits as well, and the quickest result that fits is the answer, keeping everything included.
O(operators x storages) per run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from lowtide.ir import keep_all_schedule, schedule_from_sequence
from lowtide.solve.model.compact import CompactGraph, Indices, compact, decode
from lowtide.solve.outcome import answer, with_reachable_minimum
from lowtide.solve.problem import Problem, Solution
from lowtide.solve.search.threads import in_threads

_LIMITS = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7, 0.6, 0.5)
_STEPS_PER_NODE = 6


@dataclass(frozen=True, slots=True)
class Greedy:
    """``limits``: how many limits at and below the budget are tried."""

    limits: int = len(_LIMITS)

    def solve(self, problem: Problem) -> Solution:
        began = time.perf_counter()
        model = compact(problem.graph, problem.costs)

        def attempt(budget_bytes: int) -> Solution:
            asked = replace(problem, budget_bytes=budget_bytes)
            sequences = greedy_sequences(model, budget_bytes, self.limits)
            evicting = [schedule_from_sequence(problem.graph, decode(model, codes)) for codes in sequences]
            return answer("greedy", asked, [keep_all_schedule(problem.graph), *evicting], began)

        solution = attempt(problem.budget_bytes)
        if solution.status.solved:
            return solution
        return with_reachable_minimum(attempt, solution, problem.budget_bytes)


def greedy_sequences(model: CompactGraph, budget_bytes: int, limits: int = len(_LIMITS)) -> list[Indices]:
    """Encoded sequences, one per limit for which greedy comes to an end."""
    from lowtide.solve.search.greedy_kernel import greedy_sequence

    room = max(budget_bytes - model.fixed_bytes, 0)

    def run(limit: float) -> Indices:
        return greedy_sequence(model, int(room * limit), _STEPS_PER_NODE * (model.nodes + 1))

    return [codes for codes in in_threads(run, _LIMITS[: max(limits, 1)]) if len(codes)]

"""``keep-all``: the program as written, every storage freed after its last use, nothing recomputed.

Exact and optimal in time whenever it fits the budget, since every order-preserving schedule computes each operator at
least once. Linear in the size of the graph.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from lowtide.ir import keep_all_schedule
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution, Status


@dataclass(frozen=True, slots=True)
class KeepAll:
    """No options."""

    def solve(self, problem: Problem) -> Solution:
        began = time.perf_counter()
        return answer("keep-all", problem, [keep_all_schedule(problem.graph)], began, found=Status.OPTIMAL)

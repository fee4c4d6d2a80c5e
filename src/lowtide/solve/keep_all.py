"""``keep-all``: the program as written, every storage freed after its last use, nothing recomputed.

Exact and optimal in time whenever it fits the budget, since every order-preserving schedule computes each operator at
least once. Linear in the size of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.solve.options import Options
from lowtide.solve.outcome import keeping_all
from lowtide.solve.problem import Problem, Solution


@dataclass(frozen=True, slots=True)
class KeepAll(Options):
    """The planner ``keep-all``. No options."""

    def search(self, problem: Problem) -> Solution:
        return keeping_all(self.name, problem)

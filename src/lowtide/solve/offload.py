"""``offload``: offloads storages to the second memory and fetches them, without any recomputation.

Searches for the storages to move and the times to fetch them as ``auto`` does (``lowtide.solve.moving``); transfers are placed
in the room that the budget leaves. A reference for the value of offloading alone; no guarantee. Without a second memory it
keeps everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.ir import keep_all_schedule
from lowtide.solve.moving.search import moving_schedule
from lowtide.solve.options import Options, between
from lowtide.solve.outcome import answer
from lowtide.solve.portfolio_search import EFFORTS
from lowtide.solve.problem import Problem, Solution


@dataclass(frozen=True, slots=True)
class Offload(Options):
    """The planner ``offload``. ``effort``: 0 (a few prices of transfers) to 5 (many prices, and patient searches)."""

    effort: int = between(3, min(EFFORTS), max(EFFORTS))
    moves: ClassVar[bool] = True

    def search(self, problem: Problem) -> Solution:
        moving = moving_schedule(problem, self.effort, None)
        candidates = [keep_all_schedule(problem.graph), *([] if moving is None else [moving])]
        return answer(self.name, problem, candidates)

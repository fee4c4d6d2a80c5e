"""``offload``: moves storages to the second memory and computes nothing again.

What moves, and when it comes back, is searched for as by ``auto`` (``lowtide.solve.moving``); the transfers are placed in the
room that the budget leaves. A reference for what moving alone is worth; no guarantee of any kind. Without a second memory it
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
    """``effort``: 0 (a few prices of transfers) to 5 (many, and patient searches)."""

    effort: int = between(3, min(EFFORTS), max(EFFORTS))
    moves: ClassVar[bool] = True

    def search(self, problem: Problem) -> Solution:
        moving = moving_schedule(problem, self.effort, None)
        candidates = [keep_all_schedule(problem.graph), *([] if moving is None else [moving])]
        return answer(self.name, problem, candidates)

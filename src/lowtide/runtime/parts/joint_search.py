"""The search for plans of all programs of a step together. Training waits for its first result; then it continues
between steps.

If plans may improve while training runs (``planning="background"``), training waits about two seconds for the first
plans that fit. Then the search continues at the beginning of steps, for a small share of their time.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from lowtide.pipeline import share_planners
from lowtide.settings import Settings
from lowtide.sharing import Assignment, Constraint, Member, Plans, choose
from lowtide.sharing.assignment import total_time_ns

_FIRST_SECONDS = 2.0
_SHARE = 0.2  # of training time, until the search ends
_LEAST_SECONDS = 0.5  # enough for a plan or two


class JointSearch:
    """``ended``: whether the search is complete. ``brief``: use quicker planners."""

    def __init__(self, settings: Settings, *, brief: bool) -> None:
        self.settings, self.brief = settings, brief
        self.ended = True
        self._first_seconds = _FIRST_SECONDS if settings.planning == "background" else math.inf
        self._found = Plans(), Plans()  # of the planner, and of its quick form
        self._question: tuple[Sequence[Member], Sequence[Constraint], int] = (), (), 0
        self._best: list[Assignment] | None = None  # best answer to ``_question``
        self._left = self._debt = 0.0  # time when training went on; seconds the search overran

    def first(
        self, members: Sequence[Member], constraints: Sequence[Constraint], budget_bytes: int
    ) -> list[Assignment]:
        """Assignments that fit the budget. Raises ``InfeasibleBudgetError``."""
        for plans in self._found:
            plans.begin()
        self._question, self._best, self.ended = (members, constraints, budget_bytes), None, True
        self._best = self._choose(self._first_seconds)
        return self._best

    @property
    def due_seconds(self) -> float:
        """How long training may wait for the search now, in seconds; 0 if not at all."""
        seconds = _SHARE * (time.monotonic() - self._left) - self._debt
        return 0.0 if self.ended or seconds < _LEAST_SECONDS else seconds

    def further(
        self, members: Sequence[Member], constraints: Sequence[Constraint], budget_bytes: int, seconds: float
    ) -> list[Assignment] | None:
        """Better assignments for the question of ``first``, if ``seconds`` suffice to find some, else ``None``. A
        different question ends the search."""
        known = self._question
        same = [one.program for one in members] == [one.program for one in known[0]]
        if not (same and known[1:] == (constraints, budget_bytes)):
            self.ended = True
            return None
        assert self._best is not None
        chosen, before = self._choose(seconds), self._best
        if total_time_ns(chosen, known[0]) >= total_time_ns(before, known[0]):
            return None
        self._best = chosen
        return chosen

    def _choose(self, seconds: float) -> list[Assignment]:
        members, constraints, budget_bytes = self._question
        given = dataclasses.replace(self.settings, budget=budget_bytes, total_budget=None, reserve=0)
        planning, quick = share_planners(given, brief=self.brief)
        end = time.monotonic() + seconds
        chosen = choose(members, constraints, budget_bytes, planning, quick, self._found, end, self._best)
        self._left = time.monotonic()
        self.ended, self._debt = self._left < end, max(self._left - end, 0.0)
        return chosen

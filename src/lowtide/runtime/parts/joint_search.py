"""The search for plans of all programs of a step together, which training waits for at first, and then lets go on.

Where plans may improve while training runs (``planning="background"``), training waits some two seconds for the first that
fit. Then the search goes on at the beginnings of steps, for a small share of the time that these take.
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
_SHARE = 0.2  # of the time that training takes, for as long as the search goes on
_LEAST_SECONDS = 0.5  # in which a plan or two are found


class JointSearch:
    """``ended``: whether it has found what it finds. ``brief``: its planners are a step quicker."""

    def __init__(self, settings: Settings, *, brief: bool) -> None:
        self.settings, self.brief = settings, brief
        self.ended = True
        self._first_seconds = _FIRST_SECONDS if settings.planning == "background" else math.inf
        self._found = Plans(), Plans()  # by the planner, and by its quick form
        self._question: tuple[Sequence[Member], Sequence[Constraint], int] = (), (), 0
        self._best: list[Assignment] | None = None  # that was found for it
        self._left = self._debt = 0.0  # when training went on, and what the search took too long before

    def first(
        self, members: Sequence[Member], constraints: Sequence[Constraint], budget_bytes: int
    ) -> list[Assignment]:
        """Assignments that fit. Raises ``InfeasibleBudgetError``."""
        for plans in self._found:
            plans.begin()
        self._question, self._best, self.ended = (members, constraints, budget_bytes), None, True
        self._best = self._choose(self._first_seconds)
        return self._best

    @property
    def due_seconds(self) -> float:
        """For how long training may wait for it now; 0 where not at all."""
        seconds = _SHARE * (time.monotonic() - self._left) - self._debt
        return 0.0 if self.ended or seconds < _LEAST_SECONDS else seconds

    def further(
        self, members: Sequence[Member], constraints: Sequence[Constraint], budget_bytes: int, seconds: float
    ) -> list[Assignment] | None:
        """Better assignments for what ``first`` was asked, where so many ``seconds`` bring some; it ends where it is asked
        something else."""
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

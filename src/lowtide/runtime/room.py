"""A plan for one of several programs, at once, in the room that the others leave it."""

from __future__ import annotations

import dataclasses

from lowtide.errors import InfeasibleBudgetError
from lowtide.pipeline import FIRST_PLANNER, START_PLANNER, make_program_plan
from lowtide.planning import Plan
from lowtide.settings import Settings, searches
from lowtide.sharing import Member
from lowtide.sharing.assignment import as_alone

_NEARLY = 1.1  # times the room: what a longer search may find a way within


def plan_in_room(member: Member, settings: Settings, room: int, fraction: float, *, must_fit: bool = True) -> Plan:
    """A plan within ``room`` bytes that saves about this fraction of what the program would save without one, or more where
    that cannot be. Raises ``InfeasibleBudgetError``, after a brief search unless it ``must_fit`` or nearly does."""
    asked = dataclasses.replace(settings, budget=room, total_budget=None, reserve=0, planning="wait")

    def planned(between: int, planner: str) -> Plan:
        given = dataclasses.replace(asked, between_bytes=between, planner=planner)
        return as_alone(make_program_plan(member.program, given, costs=member.costs), member)

    quick = FIRST_PLANNER if searches(settings.planner) else settings.planner
    most = between = max(room - member.limit_bytes(fraction) - member.arriving_bytes, 0) if fraction < 1 else 0
    while between:
        try:
            return planned(between, quick)
        except InfeasibleBudgetError as error:
            missing = error.minimum_bytes - room
            between = between - missing if between == most and missing < between / 2 else 0
    try:
        return planned(0, quick)
    except InfeasibleBudgetError as error:
        hopeless = error.proven or error.minimum_bytes > _NEARLY * room
        if quick == settings.planner or (hopeless and not must_fit):
            raise
        return planned(0, START_PLANNER)

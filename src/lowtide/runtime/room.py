"""A plan for one of several programs, at once, in the room that the others leave it."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    between = first = max(room - member.limit_bytes(fraction) - member.arriving_bytes, 0) if fraction < 1 else 0
    while True:
        given: dict[str, Any] = {
            "budget": room,
            "total_budget": None,
            "reserve": 0,
            "between_bytes": between,
            "planning": "wait",
        }
        asked = dataclasses.replace(settings, **given)
        try:
            return as_alone(_planned(member, asked, room, briefly=between > 0 or not must_fit), member)
        except InfeasibleBudgetError as error:
            if not between:
                raise
            missing = error.minimum_bytes - room
            between = between - missing if missing < between / 2 and between == first else 0


def _planned(member: Member, settings: Settings, room: int, *, briefly: bool) -> Plan:
    """By ``settings``, of which a planner that searches gives a first plan. Raises ``InfeasibleBudgetError``."""

    def planned(planner: str) -> Plan:
        return make_program_plan(member.program, dataclasses.replace(settings, planner=planner), costs=member.costs)

    if not searches(settings.planner):
        return planned(settings.planner)
    try:
        return planned(FIRST_PLANNER)
    except InfeasibleBudgetError as error:
        if briefly and (error.proven or error.minimum_bytes > _NEARLY * room):
            raise
        return planned(START_PLANNER)

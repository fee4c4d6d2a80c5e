"""The search for plans that share a budget: ``sharing.choose``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.pipeline import make_program_plan, program_costs
from lowtide.planning import Plan
from lowtide.settings import Settings
from lowtide.sharing import Constraint, Member, Share, choose


def test_a_program_that_has_no_room_is_not_planned_again_for_each_share() -> None:
    """However much a program may save: where it does not run in the room that it is given, no search among shares helps."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    program = capture(model, (torch.randn(256, 64),), {}).program
    member = Member(program, program_costs(program))
    asked: list[Share] = []

    def planning(member: Member, share: Share) -> Plan:
        asked.append(share)
        settings = Settings(budget=share.budget_bytes, between_bytes=share.between_bytes, planner="greedy")
        return make_program_plan(member.program, settings, costs=member.costs)

    waiting = Constraint(64, -1, False, (0,))
    running = [Constraint(64, 0, backward, ()) for backward in (False, True)]
    budget = member.eager.backward_bytes // 4
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        choose([member], [waiting, *running], budget, planning)
    rooms = [share.budget_bytes for share in asked if share.budget_bytes < budget]
    assert len(rooms) <= 3, rooms
    least = caught.value.minimum_bytes
    assert least > budget
    (found,) = choose([member], [waiting, *running], least, planning)
    assert found.footprint.backward_bytes + 64 <= least

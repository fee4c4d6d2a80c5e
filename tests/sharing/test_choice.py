"""The search for plans that share a budget: ``sharing.choose``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.pipeline import make_program_plan, program_costs, share_planners
from lowtide.planning import Plan
from lowtide.settings import Settings
from lowtide.sharing import Constraint, Member, Share, choose, sequential_constraints


def test_a_program_that_has_no_room_is_not_planned_again_for_each_share() -> None:
    """However much a program may save: where it does not run in the room that it is given, no search among shares helps."""
    member = _member(64, 4)
    asked: list[Share] = []

    def planning(member: Member, share: Share) -> Plan:
        asked.append(share)
        return _greedy(member, share)

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


def test_the_least_budget_of_several_programs_takes_few_plans_and_is_met() -> None:
    """What is named where a budget is too small is met, is nearly the least, and takes no search per budget that is tried."""
    torch.manual_seed(0)
    members = [_member(width, layers) for width, layers in ((64, 4), (96, 2), (32, 6))]
    order = [0, 1, 2, 1, 2, 0]
    constraints = sequential_constraints(order, [(1000, 2000)] * len(order), [0] * len(order))
    asked: list[Share] = []

    def planning(member: Member, share: Share) -> Plan:
        asked.append(share)
        return _greedy(member, share)

    def least(budget: int) -> int:
        try:
            choose(members, constraints, budget, planning)
        except lowtide.InfeasibleBudgetError as error:
            return error.minimum_bytes
        return budget

    low, high = 1, least(1)
    assert len(asked) <= 2 * len(members) + 1
    assert least(high) == high
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if least(middle) == middle else (middle, high)
    assert least(1) <= 1.05 * high


@pytest.mark.parametrize(
    ("planner", "brief", "used"),
    [
        ("auto{effort=2}", False, ("auto{effort=2}", "auto{effort=1}")),
        ("auto{effort=2}", True, ("auto{effort=1}", "auto{effort=0}")),
        ("greedy", True, ("greedy", None)),
    ],
)
def test_where_training_waits_searches_are_brief(planner: str, brief: bool, used: tuple[str, str | None]) -> None:
    member = _member(64, 6)
    share = Share(member.keep_all.backward_bytes * 9 // 10, 0)
    planners = share_planners(Settings(budget="50%", planner=planner), brief=brief)
    assert tuple(one and one(member, share).planner for one in planners) == used


def _member(width: int, layers: int) -> Member:
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))
    program = capture(model, (torch.randn(256, width),), {}).program
    return Member(program, program_costs(program))


def _greedy(member: Member, share: Share) -> Plan:
    settings = Settings(budget=share.budget_bytes, between_bytes=share.between_bytes, planner="greedy")
    return make_program_plan(member.program, settings, costs=member.costs)

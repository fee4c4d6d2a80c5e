"""The search for plans that share a budget: ``sharing.choose``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.cost import analytical_costs
from lowtide.pipeline import make_program_plan, share_planners
from lowtide.planning import Plan
from lowtide.settings import Settings
from lowtide.sharing import Assignment, Constraint, Member, Plans, Share, choose, sequential_constraints
from lowtide.sharing.plans import KnownPlans


def test_a_program_that_has_no_room_is_not_planned_again_for_each_share() -> None:
    """However much a program may save: where it does not run in the room that it is given, no search among shares helps."""
    member = _member(64, 4)
    asked: list[Share] = []

    def planning(member: Member, share: Share) -> Plan:
        asked.append(share)
        return _greedy(member, share)

    budget = member.eager.backward_bytes // 4
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        choose([member], _around(member), budget, planning)
    rooms = [share.budget_bytes for share in asked if share.budget_bytes < budget]
    assert len(rooms) <= 3, rooms
    least = caught.value.minimum_bytes
    assert least > budget
    (found,) = choose([member], _around(member), least, planning)
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


def test_no_search_is_made_again_for_what_was_in_vain() -> None:
    """A search for a share that no plan meets is the longest that there is; what asks for less is answered by it."""
    member = _member(64, 8)
    in_vain: list[tuple[Share, int]] = []

    def planning(member: Member, share: Share) -> Plan:
        for other, least in in_vain:
            assert share.between_bytes != other.between_bytes or share.budget_bytes >= least, (share, other, least)
        try:
            return _greedy(member, share)
        except lowtide.InfeasibleBudgetError as error:
            in_vain.append((share, error.minimum_bytes))
            raise

    with pytest.raises(lowtide.InfeasibleBudgetError):
        choose([member], _around(member), member.eager.backward_bytes // 8, planning)
    assert 0 < len(in_vain) <= 2


def test_where_only_the_room_to_run_in_is_tight_shares_are_not_searched_for() -> None:
    members = [_member(64, 12), _member(8, 1)]
    asked: list[Share] = []

    def planning(member: Member, share: Share) -> Plan:
        asked.append(share)
        return _greedy(member, share)

    constraints = sequential_constraints([0, 1], [(0, 0)] * 2, [0, 0])
    budget = members[0].eager.backward_bytes * 7 // 10
    chosen = choose(members, constraints, budget, planning)
    assert max(one.total_bytes([each.footprint for each in chosen]) for one in constraints) <= budget
    assert len(asked) <= 4, asked


def test_a_choice_that_follows_another_asks_for_little() -> None:
    """Plans that were made for more room are the best for a little less, where they do with that."""
    members = [_member(width, layers) for width, layers in ((64, 6), (96, 4))]
    constraints = sequential_constraints([0, 1, 0], [(1000, 2000)] * 3, [0] * 3)
    asked: list[Share] = []

    def planning(member: Member, share: Share) -> Plan:
        asked.append(share)
        return _greedy(member, share)

    budget = max(one.total_bytes([member.eager for member in members]) for one in constraints) * 6 // 10
    known = Plans(), Plans()
    first = choose(members, constraints, budget, planning, planning, known)
    before = len(asked)
    assert [one.footprint for one in choose(members, constraints, budget, planning, planning, known)] == [
        one.footprint for one in first
    ]
    assert len(asked) == before
    choose(members, constraints, budget + 100, planning, planning, known)
    assert len(asked) - before <= before // 2


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_choice_that_stops_fits_and_goes_on_to_what_it_would_have_found(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon it stops: each time that it asks for the time, that is later."""
    members = [_member(width, layers) for width, layers in ((64, 6), (96, 4), (32, 8))]
    order = [0, 1, 2, 1, 0]
    constraints = sequential_constraints(order, [(1000, 2000)] * len(order), [0] * len(order))
    budget = int(max(one.total_bytes([member.eager for member in members]) for one in constraints) * share)

    def seconds(chosen: Sequence[Assignment]) -> int:
        return sum(one.time_ns(member) for one, member in zip(chosen, members, strict=True))

    whole = seconds(choose(members, constraints, budget, _greedy, _greedy))
    clock = itertools.count()
    monkeypatch.setattr("lowtide.sharing.choice.time.monotonic", lambda: next(clock))
    known, best, slices = (Plans(), Plans()), None, 0
    while True:
        end = next(clock) + 4
        found = choose(members, constraints, budget, _greedy, _greedy, known, end, best)
        assert max(one.total_bytes([each.footprint for each in found]) for one in constraints) <= budget
        best = found if best is None or seconds(found) < seconds(best) else best
        slices += 1
        if next(clock) <= end:
            break
    assert slices > 2
    assert seconds(best) <= whole


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
    return Member(program, analytical_costs(program))


def _around(member: Member) -> list[Constraint]:
    """Of a step in which it waits while code that keeps 64 bytes runs."""
    running = [Constraint(64, 0, backward, ()) for backward in (False, True)]
    return [Constraint(64, -1, False, (0,)), *running]


def _greedy(member: Member, share: Share) -> Plan:
    settings = Settings(budget=share.budget_bytes, between_bytes=share.between_bytes, planner="greedy")
    return make_program_plan(member.program, settings, costs=member.costs)


@pytest.mark.parametrize(("between", "least"), [(100, 1500), (200, 1500), (300, 1600)])
def test_what_was_in_vain_is_answered_at_once(between: int, least: int) -> None:
    """With a least budget that leaves as many bytes while the program waits as the one that was named."""
    known = KnownPlans()
    known.failed(Share(1000, 200), lowtide.InfeasibleBudgetError("no", minimum_bytes=1500, budget_bytes=1000))
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        known.check(Share(least - 200, between))
    assert caught.value.minimum_bytes == least
    known.check(Share(least, between))

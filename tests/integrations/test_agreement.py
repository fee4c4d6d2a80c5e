"""One plan for several processes, by their store: here two threads of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.capture import capture
from lowtide.pipeline import make_program_plan
from lowtide.program import Program
from lowtide.settings import Settings
from lowtide.sharing import agreement
from tests.support.networks import WithLoss, perceptron, rows


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    torch.manual_seed(0)
    return capture(WithLoss(perceptron()), *rows()(0)).program


def _plan(program: Program) -> lowtide.Plan:
    return make_program_plan(program, Settings(budget="60%", planner="greedy"))


def test_the_first_plans_for_all(program: Program) -> None:
    made, found = [], []
    begun = threading.Event()

    def first() -> lowtide.Plan:
        begun.set()
        made.append(_plan(program))
        return made[0]

    def second() -> lowtide.Plan:
        raise AssertionError("the second process planned too")

    thread = threading.Thread(target=lambda: agreement.agreed_plan(program, "60%", first))
    thread.start()
    assert begun.wait(60)
    found.append(agreement.agreed_plan(program, "60%", second))
    thread.join()
    (ours,), (theirs,) = made, found
    assert str(theirs.schedule) == str(ours.schedule)
    assert (theirs.peak_bytes, theirs.time_ns, theirs.planner) == (ours.peak_bytes, ours.time_ns, ours.planner)
    assert theirs.costs.time_ns.tolist() == ours.costs.time_ns.tolist()
    assert theirs.graph is program.graph


def test_other_settings_and_programs_do_not_meet(program: Program) -> None:
    other = capture(WithLoss(perceptron()), *rows(batch=8)(0)).program
    keys = {agreement.program_key(p, asked) for p in (program, other) for asked in ("60%", "50%")}
    assert len(keys) == 4
    torch.manual_seed(1)
    assert agreement.program_key(capture(WithLoss(perceptron()), *rows()(0)).program, "60%") in keys


def test_a_failure_is_everyones_own(program: Program) -> None:
    def fail() -> Any:
        raise lowtide.InfeasibleBudgetError("too little", minimum_bytes=7)

    for _ in range(2):
        with pytest.raises(lowtide.InfeasibleBudgetError, match="too little"):
            agreement.agreed_plan(program, "1%", fail)


def test_better_plans_are_for_the_same_call(program: Program) -> None:
    """One leads; the others hear of each plan in turn, with the call at which all exchange it, and when no more will come."""
    plan = _plan(program)
    leader, follower = (agreement.Successors(program, plan) for _ in range(2))
    assert (leader.leads, follower.leads) == (True, False)
    assert follower.take() is None
    assert not follower.have_ended()
    ats = [leader.publish(plan, call) for call in (3, 11)]
    assert ats[0] > 3 and ats[1] > 11
    leader.end(0)
    heard = [follower.take(), follower.take()]
    assert [one[0] for one in heard if one is not None] == ats
    assert all(one is not None and str(one[1].schedule) == str(plan.schedule) for one in heard)
    assert follower.take() is None
    assert follower.have_ended()
    assert follower.are_through


def test_what_is_found_last_is_heard_after_the_end(program: Program) -> None:
    """The search ends while a plan waits for its call and another one for that."""
    plan = _plan(program)
    leader, follower = (agreement.Successors(program, plan) for _ in range(2))
    leader.publish(plan, 0)
    leader.end(1)
    assert follower.take() is not None
    assert follower.have_ended()
    assert not follower.are_through
    leader.publish(plan, 9)
    assert follower.take() is not None
    assert follower.are_through

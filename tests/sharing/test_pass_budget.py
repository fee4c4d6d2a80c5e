"""The budget that the programs of a step share, and how one in percent grows with the steps that are known."""

from __future__ import annotations

import pytest

from lowtide.settings import Settings
from lowtide.sharing.pass_budget import StepBudget

HALF = Settings(budget="50%")


def test_a_percentage_is_of_the_step_that_took_most() -> None:
    assert StepBudget(HALF).of_plain(10_000) == 5_000
    assert StepBudget(HALF, granted_bytes=4_000).of_plain(10_000) == 5_000
    assert StepBudget(HALF, granted_bytes=7_000).of_plain(10_000) == 7_000
    assert StepBudget(Settings(budget=4_000)).of_plain(10_000) == 4_000


@pytest.mark.parametrize(("granted", "bytes_given"), [(0, 5_000), (3_000, 3_000), (7_000, 7_000)])
def test_what_was_granted_stays_where_steps_do_not_tell(granted: int, bytes_given: int) -> None:
    """And nothing stays where nothing was granted yet."""
    assert StepBudget(HALF, granted_bytes=granted, fixed=True).of_plain(10_000) == bytes_given


def test_a_percentage_is_stretched_by_a_percent_once() -> None:
    budget = StepBudget(HALF)
    assert not budget.stretches(5_051, 5_000)
    assert budget.stretches(5_050, 5_000)
    assert not budget.stretches(5_050, 5_000)
    assert not StepBudget(Settings(budget=5_000)).stretches(5_050, 5_000)

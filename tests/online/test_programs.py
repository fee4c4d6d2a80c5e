"""Programs that no capture covers, inside 70, 50 and 30 % of their eager peak: the same to the bit, within the budget."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys

import pytest

import lowtide
from examples.dynamic import NAMES, load
from lowtide.dynamic import statistics
from tests.online.programs_support import assert_same, eager, train
from tests.support.wide import is_wide, pairs

_NEVER = float("inf")  # recomputation is what is tested, so it is not warned of
HEURISTICS = ("dtr", "dtr-eq", "dtr-local", "lru", "size", "msps", "random")


@pytest.mark.parametrize("name", NAMES)
def test_training_is_reproducible(name: str) -> None:
    """What the other tests rest on: two plain runs are the same, and take the same memory."""
    again = train(load(name)(1), contextlib.nullcontext())
    assert_same(again, eager(name))
    assert (again.peak_bytes, again.final_bytes) == (eager(name).peak_bytes, eager(name).final_bytes)


CELLS = pairs(NAMES, (30, 50, 70))
# Double backward, where memory is short.
UNSTEADY = [("maml", 50), pytest.param("maml", 30, marks=pytest.mark.slow), ("unrolled_gan", 40)]


@pytest.mark.parametrize(("name", "share"), CELLS)
def test_within_budget_and_equal(name: str, share: int) -> None:
    expected = eager(name)
    budget = expected.peak_bytes * share // 100
    session = lowtide.online(budget, warn_above=_NEVER, planning="background" if share == 50 else "never")
    outcome = train(load(name)(1), session)
    assert_same(outcome, expected)
    assert outcome.peak_bytes <= budget
    assert outcome.final_bytes == expected.final_bytes
    assert session.statistics.evictions > 0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "share"), UNSTEADY)
def test_whatever_operators_cost(name: str, share: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evicted depends on the times that are measured; that it can be rebuilt does not."""
    draw = random.Random(seed)
    times = itertools.accumulate(int(10 ** draw.uniform(3.0, 5.5)) for _ in itertools.count())
    monkeypatch.setattr(statistics, "now_ns", times.__next__)
    test_within_budget_and_equal(name, share)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one == "lstm" else one for one in NAMES])
def test_nothing_is_evicted_where_everything_fits(name: str) -> None:
    expected = eager(name)
    session = lowtide.online(2 * expected.peak_bytes)
    outcome = train(load(name)(1), session)
    assert_same(outcome, expected)
    assert session.statistics.rematerializations == 0
    assert outcome.final_bytes == expected.final_bytes


@pytest.mark.parametrize("heuristic", [*HEURISTICS[:-2], pytest.param("msps", marks=pytest.mark.slow), HEURISTICS[-1]])
def test_every_heuristic(heuristic: str) -> None:
    name = "lstm" if is_wide() else "unrolled_gan"  # longer, and slow where all neighbours are looked at
    expected = eager(name)
    budget = expected.peak_bytes // 2
    session = lowtide.online(budget, heuristic=heuristic, warn_above=_NEVER, planning="never")
    outcome = train(load(name)(1), session)
    assert_same(outcome, expected)
    assert outcome.peak_bytes <= budget
    assert session.statistics.rematerializations > 0


@pytest.mark.parametrize(("limits", "sample"), pairs((("ignore", 90), ("eager", 50), ("banish", 90)), (True, False)))
def test_every_policy(limits: tuple[str, int], sample: bool) -> None:
    """Banishing keeps for good what was computed from a tensor that is gone, so it needs more."""
    policy, share = limits
    expected = eager("early_exit")
    budget = expected.peak_bytes * share // 100
    outcome = train(load("early_exit")(1), lowtide.online(budget, policy=policy, sample=sample, warn_above=_NEVER))
    assert_same(outcome, expected)
    assert outcome.peak_bytes <= budget


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_below_the_working_set_is_refused(name: str) -> None:
    """One operator alone needs more than a hundredth of the peak: the error says which, and where it was called."""
    budget = eager(name).peak_bytes // 100
    with pytest.raises(lowtide.OnlineBudgetError) as caught:
        train(load(name)(1), lowtide.online(budget, warn_above=_NEVER, planning="never"))
    assert caught.value.needed_bytes > caught.value.budget_bytes == budget
    assert caught.value.operator in str(caught.value)
    assert f"{name}.py" in caught.value.location or "site-packages" in caught.value.location


@pytest.mark.slow
def test_command() -> None:
    """``python -m examples.dynamic`` compares the two runs itself and says so."""
    command = [sys.executable, "-m", "examples.dynamic", "lstm", "--budget", "50%", "--steps", "2"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("equal to the bit") == 2
    assert "kept" in finished.stdout

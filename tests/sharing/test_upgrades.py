"""What is left of a shared budget, given to members one by one where there are too many to look at every choice."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.sharing import Assignment, Constraint, Footprint, upgrades
from lowtide.sharing.upgrades import quickest, upgraded


def _assignment(saved: int, time_ns: int) -> Assignment:
    plan: Any = SimpleNamespace(time_ns=time_ns)
    return Assignment(Footprint(saved, saved + 5, saved + 10), plan=plan)


def _time(chosen: list[Assignment]) -> int:
    return sum(one.plan.time_ns for one in chosen if one.plan is not None)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "_FEW", 0)


@pytest.mark.usefixtures("one_by_one")
def test_upgrades_are_never_slower_always_fit_and_are_mostly_the_best() -> None:
    generator = random.Random(0)
    improved = best = 0
    for _ in range(200):
        count = generator.randint(1, 5)
        menus = [
            [_assignment(generator.randint(1, 9) * 10, generator.randint(1, 100)) for _ in range(3)]
            for _ in range(count)
        ]
        members: list[Any] = [None] * count
        constraints = [Constraint(generator.randint(0, 20), i, False, tuple(range(i))) for i in range(count)]
        constraints.append(Constraint(0, -1, False, tuple(range(count))))
        chosen = [max(menu, key=lambda one: _time([one])) for menu in menus]
        budget = max(one.total_bytes([each.footprint for each in chosen]) for one in constraints)
        budget += generator.randint(0, 100)
        result = upgraded(members, constraints, chosen, menus, budget)
        assert max(one.total_bytes([each.footprint for each in result]) for one in constraints) <= budget
        assert _time(result) <= _time(chosen)
        improved += _time(result) < _time(chosen)
        best += _time(result) == _time(quickest(members, constraints, menus, budget))
    assert improved > 150
    assert best > 100


@pytest.mark.usefixtures("one_by_one")
def test_the_last_of_equal_members_goes_first() -> None:
    """Fewer others run while what it saves waits."""
    members: list[Any] = [None] * 3
    constraints = [Constraint(0, -1, False, (0, 1, 2))]
    slow, quick = _assignment(10, 100), _assignment(20, 50)
    result = upgraded(members, constraints, [slow] * 3, [[quick]] * 3, 40)
    assert [one is quick for one in result] == [False, False, True]

"""What code can write outside of itself."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.capture.python_state.code import code_names
from lowtide.capture.python_state.guards import reach
from lowtide.capture.python_state.guards.reach import Reach

_kept: list[int] = []


def _keep() -> None:
    _kept.append(1)


def _calling(function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        function()

    return call


def _far(function: Callable[[], None], steps: int) -> Callable[[], None]:
    for _ in range(steps):
        function = _calling(function)
    return function


@pytest.mark.parametrize(("steps", "is_reached"), [(4, True), (5, False)])
def test_what_is_within_so_many_steps(steps: int, is_reached: bool) -> None:
    found = Reach()
    found.add([(_far(_keep, steps), "far")])
    _kept.append(2)
    assert (found.changed() != []) == is_reached
    found.put_back()
    assert _kept == ([] if is_reached else [2])
    _kept.clear()


def test_what_is_far_by_one_way_and_near_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked into once, as what is near: more can be reached from there."""
    looked: collections.Counter[Any] = collections.Counter()

    def counting(function: Any) -> Iterator[tuple[str, Any]]:
        looked[function] += 1
        return code_names.named_by(function)

    monkeypatch.setattr(reach, "named_by", counting)
    near = _far(_keep, 3)
    found = Reach()
    found.add([(_far(near, 3), "far"), (_far(near, 1), "near")])
    _kept.append(2)
    assert found.changed() == [f"{__name__}._kept"]
    found.put_back()
    assert _kept == []
    assert looked[near] == 1 and max(looked.values()) == 1


def test_what_was_empty_and_is_filled() -> None:
    """Attributes of a function, of which most have none."""

    def counting() -> None:
        counting.calls = [1]  # type: ignore[attr-defined]

    found = Reach()
    found.add([(counting, "the function")])
    counting()
    assert found.changed() == ["the function"]
    now = found.as_now()
    assert now.changed() == []
    counting.calls.append(2)  # type: ignore[attr-defined]
    assert now.changed() == ["the function"]
    found.put_back()
    assert not vars(counting)

"""What of a step is remembered from one to the next, and what is worked out again."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.runtime.parts.forward_pass import ForwardPass, Passes, left_gradient_bytes
from lowtide.runtime.parts.step_record import StepRecord

_GRAPH: Any = object()
_ENTRY: Any = object()


def _pass(number: int, entry: Any = _ENTRY, *, between: int = 10, gradient: int = 100) -> ForwardPass:
    return ForwardPass((number, 0), _GRAPH, entry, lambda: None, between, ((gradient, number),))


def _merged(record: StepRecord, passes: list[ForwardPass], gap: int = 5) -> StepRecord:
    record.merge(passes, [(gap, tuple(passes[:1]))], lambda one: 1)
    return record


def test_the_same_step_again_is_known() -> None:
    record = _merged(StepRecord(), [_pass(0), _pass(1)])
    record.over = (7, 1000)
    assert _merged(record, [_pass(0), _pass(1)]).over == (7, 1000)
    assert _merged(record, [_pass(0, between=9)], gap=4).over == (7, 1000)  # it takes less


@pytest.mark.parametrize(
    ("passes", "gap"),
    [
        ([_pass(0), _pass(1), _pass(2)], 5),
        ([_pass(0), _pass(1, entry=object())], 5),
        ([_pass(0), _pass(1, between=11)], 5),
        ([_pass(0), _pass(1, gradient=101)], 5),
        ([_pass(0), _pass(1)], 6),
    ],
)
def test_another_step_is_worked_out_again(passes: list[ForwardPass], gap: int) -> None:
    record = _merged(StepRecord(), [_pass(0), _pass(1)])
    record.over = (7, 1000)
    assert _merged(record, passes, gap).over is None
    assert [one.entry for one in record.passes] == [one.entry for one in passes]


def test_what_may_run_besides_is_worked_out_again() -> None:
    record = _merged(StepRecord(), [_pass(0)])
    record.over = (7, 1000)
    record.expect(lambda passes: passes)
    assert record.over == (7, 1000)
    record.expect(lambda passes: [*passes, _pass(1)])
    assert record.over is None and len(record.passes) == 2


def test_gradients_that_are_left_are_those_of_all_that_ran() -> None:
    passes = Passes()
    for number in range(4):
        passes.append(_pass(number, gradient=10**number))
        assert passes.left_bytes() == left_gradient_bytes(passes, sums=False)
    assert passes.left_bytes() == [1110, 1100, 1000, 0]
    assert Passes(passes[:2]).left_bytes() == [10, 0]

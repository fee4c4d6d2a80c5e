"""What the forward passes of a step leave for one another, some of them within the backward pass of others."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.runtime.parts.forward_pass import ForwardPass, left_gradient_bytes, waiting_places

FIRST, LAST, INNER, NEXT = (0, 0), (1, 0), (2, 0), (3, 0)


def _pass(key: tuple[int, int], gradients: tuple[tuple[int, Any], ...], waiting: Any = None) -> ForwardPass:
    unused: Any = None
    return ForwardPass(key, unused, unused, unused, 0, gradients, waiting=waiting)


@pytest.mark.parametrize("adds", [False, True])
def test_passes_within_the_backward_pass(adds: bool) -> None:
    """The last one is over when an inner one runs, and another after it, and then the first one's backward pass begins."""
    ran = [
        _pass(FIRST, ((1, 10),)),
        _pass(LAST, ((2, 20), (64, FIRST))),
        _pass(INNER, ((4, 30),), waiting=(FIRST,)),
        _pass(NEXT, ((8, 10 if adds else 40),), waiting=(FIRST,)),
    ]
    assert waiting_places(ran) == [(), (0,), (0,), (0,)]
    left = left_gradient_bytes(ran)
    assert left == [2 + 4 + 8 + adds * 1, 0, 0, 0]


def test_passes_in_order() -> None:
    ran = [_pass(FIRST, ((1, 10),)), _pass(LAST, ((2, 20), (64, FIRST))), _pass(NEXT, ((4, 10),))]
    assert waiting_places(ran) == [(), (0,), (0, 1)]
    assert left_gradient_bytes(ran) == [2 + 4 + 1, 4, 0]
    assert left_gradient_bytes(ran, sums=False) == [2 + 4, 4, 0]

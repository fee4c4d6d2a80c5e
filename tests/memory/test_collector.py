"""The collector of reference cycles is slowed inside the online mode, and as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import lowtide


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


def test_inside_it_looks_less_often(thresholds: tuple[int, int, int]) -> None:
    with lowtide.online(1 << 20):
        with lowtide.online(1 << 19):
            assert gc.get_threshold()[0] > thresholds[0] and gc.get_threshold()[1:] == thresholds[1:]
        assert gc.get_threshold() != thresholds
    assert gc.get_threshold() == thresholds


def test_also_after_an_error(thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(lowtide.OnlineBudgetError), lowtide.online(1 << 10):
        torch.ones(1 << 10).exp()
    assert gc.get_threshold() == thresholds


def test_what_the_program_sets_itself_stays(thresholds: tuple[int, int, int]) -> None:
    with lowtide.online(1 << 20):
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)
    for own in ((0, 10, 10), (1 << 20, 10, 10)):
        gc.set_threshold(*own)
        with lowtide.online(1 << 20):
            assert gc.get_threshold() == own
        assert gc.get_threshold() == own

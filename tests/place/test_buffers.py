"""Buffers: what they refuse, their load, and the sections that stand for all times."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.errors import PlanError
from lowtide.place import Buffers
from lowtide.place.buffers import sections
from tests.place.instances import load, random_rows
from tests.support.wide import seeds


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_the_load_is_what_is_live_at_once(seed: int) -> None:
    rows = random_rows(seed, 12)
    assert Buffers.of(rows).load_bytes == load(rows)


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_sections_are_the_largest_live_sets(seed: int) -> None:
    rows = random_rows(seed, 10)
    found = sections(Buffers.of(rows))
    live = [
        {i for i in range(len(rows)) if found.first[i] <= section < found.last[i]}
        for section in range(len(found.load_bytes))
    ]
    at_times = [{i for i, (lower, upper, _) in enumerate(rows) if lower <= time < upper} for time in range(9)]
    largest = [one for one in at_times if not any(one < other for other in at_times)]
    assert all(one in live for one in largest if one)
    assert all(one in largest for one in live)
    assert found.load_bytes.tolist() == [sum(rows[i][2] for i in one) for one in live]


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    buffers = Buffers.of([(0, 2, 1), (1, 2, 64), (1, 2, 65), (1, 2, 0)], alignment=64)
    assert buffers.padded.tolist() == [64, 64, 128, 0]
    assert buffers.load_bytes == 256


def test_no_buffers() -> None:
    assert Buffers.of([]).load_bytes == 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((5, 5, 1), "buffer 1 lives from 5 to before 5; upper must be above lower."),
        ((5, 3, 1), "buffer 1 lives from 5 to before 3; upper must be above lower."),
        ((5, 6, -1), "buffer 1 has a size of -1 bytes"),
        ((0, 1, 1 << 62), "more bytes together than any device has"),
    ],
)
def test_what_cannot_be_is_refused(row: tuple[int, int, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Buffers.of([(0, 1, 1), row])


def test_columns_and_alignment_are_checked() -> None:
    column = np.arange(2)
    with pytest.raises(PlanError, match="as many lifetimes as sizes"):
        Buffers(column, column + 1, np.arange(3))
    with pytest.raises(PlanError, match="the alignment is 0 bytes"):
        Buffers(column, column + 1, column, alignment=0)

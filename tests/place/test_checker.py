"""The checker against a test of all pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lowtide.place import Buffers, fault
from tests.place.instances import overlapping, random_rows


@pytest.mark.parametrize("count", [2, 3, 6, 12])
def test_it_sees_every_overlap_and_nothing_else(count: int) -> None:
    verdicts = set()
    for seed in range(150):
        buffers = Buffers.of(random_rows(seed, count))
        offsets = [random.Random(seed).randrange(count * 6) for _ in range(count)]
        wrong = fault(buffers, np.array(offsets))
        assert (wrong is not None) == overlapping(buffers, offsets)
        verdicts.add(wrong is None)
    assert verdicts == {True, False} or count == 12  # a dozen hardly ever lie well by chance


def test_it_says_what_is_wrong() -> None:
    buffers = Buffers.of([(0, 4, 8), (3, 5, 8), (4, 6, 8)], alignment=4)
    assert fault(buffers, np.array([0, 8, 0])) is None
    assert (
        fault(buffers, np.array([0, 4, 12]))
        == "buffers 0 and 1 are both live at 3 and overlap: bytes 0 to 8 and 4 to 12"
    )
    said = fault(buffers, np.array([0, 8, 4]), ["a", "b", "c"])
    assert said == "buffers b and c are both live at 4 and overlap: bytes 8 to 16 and 4 to 12"
    assert fault(buffers, np.array([0, 8, 6])) == "buffer 2 is at offset 6, which is no multiple of 4 from 0 on"
    assert fault(buffers, np.array([0, -4, 0])) == "buffer 1 is at offset -4, which is no multiple of 4 from 0 on"
    assert fault(buffers, np.array([0, 8])) == "there are 2 offsets for 3 buffers"

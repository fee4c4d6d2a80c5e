"""The search for the largest number that passes: right from any guess, in few tests."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lowtide.batches.find import largest


@given(answer=st.integers(0, 5000), guess=st.integers(-3, 9000), limit=st.integers(1, 6000))
def test_finds_the_answer_from_any_guess(answer: int, guess: int, limit: int) -> None:
    asked: list[int] = []

    def passes(number: int) -> bool:
        assert 1 <= number <= limit
        asked.append(number)
        return number <= answer

    assert largest(passes, guess, limit) == min(answer, limit)
    assert len(asked) == len(set(asked))
    assert len(asked) <= 2 * math.log2(limit) + 8


def test_a_good_guess_takes_few_tests() -> None:
    asked: list[int] = []

    def passes(number: int) -> bool:
        asked.append(number)
        return number <= 1000

    assert largest(passes, 990, 1 << 20) == 1000
    assert len(asked) <= 8

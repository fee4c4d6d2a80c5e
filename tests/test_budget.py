"""Budgets in every way a user may write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowtide.budget import parse_budget
from lowtide.errors import PlanError

PEAK = 695_668_745


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, 1),
        (10**12, 10**12),
        ("123", 123),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        (" 700 MB ", 700 * 10**6),
        ("1.5e9", 1_500_000_000),
        ("1.5KiB", 1536),
        (".5kB", 500),
        ("100%", PEAK),
        ("40%", PEAK * 40 // 100),
        ("12.5 %", PEAK // 8),
        ("150%", PEAK * 3 // 2),
        (np.int64(1000), 1000),
        (np.float32(1000.5), 1000),
    ],
)
def test_amounts(budget: Any, expected: int) -> None:
    assert parse_budget(budget, PEAK) == expected


@pytest.mark.parametrize("peak", [1, 7, 49, 2**53 + 1, 2**60 - 1])
def test_the_whole_peak_is_exact(peak: int) -> None:
    assert parse_budget("100%", peak) == peak


def test_a_percentage_of_nothing_is_a_byte() -> None:
    assert parse_budget("45%", 0) == parse_budget("45%", 2) == 1


def test_a_percentage_where_there_is_no_peak_to_be_a_part_of() -> None:
    assert parse_budget("1KiB", None) == 1024
    with pytest.raises(PlanError, match=r"a capacity is no share of anything, as '45%' would be.*8GiB"):
        parse_budget("45%", None, what="capacity")


@pytest.mark.parametrize("budget", [0, -1, "0", "-8GiB", "0%", "-40%", 0.0, "0.3B"])
def test_not_positive(budget: Any) -> None:
    with pytest.raises(PlanError, match=r"not positive.*8GiB"):
        parse_budget(budget, PEAK)


def test_a_negative_share_is_no_number_of_bytes() -> None:
    with pytest.raises(PlanError, match=r"an offload_budget of '-40%' is not positive"):
        parse_budget("-40%", PEAK, what="offload_budget")


@pytest.mark.parametrize("budget", [0.4, "0.4", np.float32(0.4)])
def test_a_fraction_is_no_percentage(budget: Any) -> None:
    with pytest.raises(PlanError, match=r'for that part of the peak write "40%"'):
        parse_budget(budget, PEAK)


@pytest.mark.parametrize("budget", [0.4, "0.4", -1, "12 apples", None, 10**30])
def test_no_percentage_is_advised_where_none_is_taken(budget: Any) -> None:
    with pytest.raises(PlanError, match='"700 MB"') as refused:
        parse_budget(budget, None)
    assert "%" not in str(refused.value)


@pytest.mark.parametrize(
    "budget", ["12 apples", "", "GiB", "8 Gi B", "1e9999", "nan", True, None, [1], float("nan"), float("inf"), b"8GiB"]
)
def test_not_a_budget(budget: Any) -> None:
    with pytest.raises(PlanError, match=r"not a budget.*40%"):
        parse_budget(budget, PEAK)

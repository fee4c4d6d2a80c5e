"""Budgets as users write them: bytes, bytes with a unit, or a percentage of the unconstrained peak."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction
from typing import TypeGuard

from lowtide.errors import PlanError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*([a-z]*|%)\s*", re.IGNORECASE)
_LIMIT = 1 << 62  # sums of such amounts fit in 64 bits
_IN_BYTES = 'give bytes as an int, or a string with a unit such as "8GiB" or "700 MB"'
_IN_BYTES_OR_PERCENT = (
    'give bytes as an int, a string with a unit such as "8GiB" or "700 MB", or a percentage such as "40%"'
)


def parse_budget(
    budget: int | str, unconstrained_peak_bytes: int | None, *, what: str = "budget", least: int = 1
) -> int:
    """``budget`` in bytes, rounded down. A percentage refers to ``unconstrained_peak_bytes``, and gives at least one
    byte.

    Raises ``PlanError``, with the name ``what``, if it is not an amount of at least ``least`` (0 or 1), or a percentage
    without a peak.
    """
    named = f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
    examples = _IN_BYTES if unconstrained_peak_bytes is None else _IN_BYTES_OR_PERCENT
    refused = PlanError(f"{budget!r} is not {named}; {examples}.")
    share: float | Fraction = 0
    if isinstance(budget, str):
        match = _PATTERN.fullmatch(budget)
        unit = match[2].lower() if match else ""
        if match is None or (unit != "%" and unit not in _UNITS):
            raise refused
        if unit == "%" and unconstrained_peak_bytes is None:
            raise PlanError(f"{named} is no share of anything, as {budget!r} would be; {_IN_BYTES}.")
        scale = Fraction(unconstrained_peak_bytes or 0, 100) if unit == "%" else _UNITS[unit]
        number = Fraction(match[1])
        amount = math.floor(number * scale)  # exact: 100% is the peak to the byte
        if unit == "%":  # at least one byte, for programs that only make views
            amount = max(amount, 1) if number > 0 else amount
        share = number if unit == "" else 0
    elif not (_is_real(budget) and math.isfinite(budget)):
        raise refused
    else:
        amount, share = math.floor(budget), budget
    if amount >= _LIMIT:
        raise PlanError(f"{named} of {budget!r} is more than any device has; {examples}.")
    fraction = 0 < share < 1
    if amount < least or fraction:
        has_peak = fraction and unconstrained_peak_bytes is not None
        meant = f' (for that part of the peak write "{100 * float(share):g}%")' if has_peak else ""
        bytes_of = "" if is_percentage(budget) or not least else f"{amount} bytes, which is "
        wrong = "not positive" if least else "less than a byte" if fraction else "negative"
        raise PlanError(f"{named} of {budget!r} is {bytes_of}{wrong}{meant}; {examples}.")
    return amount


def parse_reserve(reserve: int | str, peak_bytes: int | None) -> int:
    """The bytes to leave free, 0 or more. Raises ``PlanError``."""
    return parse_budget(reserve, peak_bytes, what="reserve", least=0)


def parse_bandwidth(text: str) -> int:
    """Bytes per second, from text such as ``16GB/s``. Raises ``PlanError``."""
    amount, slash, unit = text.strip().rpartition("/")
    if not slash or unit.strip() != "s":
        raise PlanError(f"{text!r} is not a bandwidth; give bytes per second with a unit, such as 16GB/s.")
    return parse_budget(amount, None, what="bandwidth")


def is_percentage(budget: float | str | None) -> bool:
    return isinstance(budget, str) and budget.strip().endswith("%")


def is_amount(value: object) -> bool:
    """Whether ``value`` is a number of at least 0."""
    return _is_real(value) and float(value) >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number and not NaN."""
    return _is_real(value) and float(value) == float(value)


def _is_real(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number of Python or NumPy."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)

"""Budgets as users write them: bytes, bytes with a unit, or a percentage of the unconstrained peak."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction

from lowtide.errors import PlanError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*([a-z]*|%)\s*", re.IGNORECASE)
_LIMIT = 1 << 62  # sums of it fit into 64 bits
_IN_BYTES = 'give bytes as an int, or a string with a unit such as "8GiB" or "700 MB"'
_EXAMPLES = 'give bytes as an int, a string with a unit such as "8GiB" or "700 MB", or a percentage such as "40%"'


def parse_budget(budget: int | str, unconstrained_peak_bytes: int | None, *, what: str = "budget") -> int:
    """``budget`` in bytes, rounded down; a percentage is of ``unconstrained_peak_bytes``, and a byte at least.

    Raises ``PlanError``, naming ``what``, for anything that is not a positive amount, and for a percentage of ``None``.
    """
    refused = PlanError(f"{budget!r} is not a {what}; {_EXAMPLES}.")
    if isinstance(budget, str):
        match = _PATTERN.fullmatch(budget)
        unit = match[2].lower() if match else ""
        if match is None or (unit != "%" and unit not in _UNITS):
            raise refused
        if unit == "%" and unconstrained_peak_bytes is None:
            raise PlanError(f"a {what} is no share of anything, as {budget!r} would be; {_IN_BYTES}.")
        scale = Fraction(unconstrained_peak_bytes or 0, 100) if unit == "%" else _UNITS[unit]
        share = Fraction(match[1])
        amount = int(share * scale)  # exact: 100% is the peak to the byte
        if unit == "%" and share > 0:
            amount = max(amount, 1)  # of what takes nothing: a program that only makes views
    elif isinstance(budget, bool) or not isinstance(budget, (int, float)) or not math.isfinite(budget):
        raise refused
    else:
        amount = int(budget)
    if amount >= _LIMIT:
        raise PlanError(f"a {what} of {budget!r} is more than any device has; {_EXAMPLES}.")
    if amount < 1:
        fraction = isinstance(budget, float) and 0 < budget < 1
        meant = f' (for that part of the peak write "{100 * float(budget):g}%")' if fraction else ""
        raise PlanError(f"a {what} of {budget!r} is {amount} bytes, which is not positive{meant}; {_EXAMPLES}.")
    return amount


def parse_bandwidth(text: str) -> int:
    """Bytes per second from text such as ``16GB/s``. Raises ``PlanError``."""
    amount, slash, unit = text.strip().rpartition("/")
    if not slash or unit.strip() != "s":
        raise PlanError(f"{text!r} is not a bandwidth; give bytes per second with a unit, such as 16GB/s.")
    return parse_budget(amount, None, what="bandwidth")


def is_percentage(budget: int | str | None) -> bool:
    return isinstance(budget, str) and budget.strip().endswith("%")


def is_amount(value: object) -> bool:
    """Whether ``value`` is a number from 0 on."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and float(value) >= 0

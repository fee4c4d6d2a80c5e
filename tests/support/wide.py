"""How widely tests look: ``make test`` takes some of the seeds and budgets that ``make test-all`` takes.

``tests/conftest.py`` calls ``narrow`` where slow tests are left out, before any test is imported. Processes that tests start
look as widely as the tests do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

_NARROW = "LOWTIDE_TESTS_NARROW"
_wide = _NARROW not in os.environ


def narrow() -> None:
    """Look at less, for the whole session."""
    global _wide
    _wide, os.environ[_NARROW] = False, "1"


def is_wide() -> bool:
    """Whether slow tests run, too: then every test looks as widely as it can."""
    return _wide


def seeds(quick: int, wide: int) -> range:
    """The first ``quick`` seeds, or all ``wide`` of them."""
    return range(wide if _wide else quick)


def pairs(one: Iterable[Any], other: Iterable[Any]) -> list[tuple[Any, Any]]:
    """So many pairs that every value is in one, or all pairs."""
    first, second = list(one), list(other)
    if _wide:
        return list(itertools.product(first, second))
    return [(first[i % len(first)], second[i % len(second)]) for i in range(max(len(first), len(second)))]

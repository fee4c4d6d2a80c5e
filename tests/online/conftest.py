"""One thread: the same sums in the same order; steady costs: the same evictions in every run."""

from __future__ import annotations

import itertools

import pytest

from lowtide.dynamic import statistics
from tests.support.fixtures import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def _steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator seems to take equally long, so that what is evicted does not depend on how busy the machine is."""
    monkeypatch.setattr(statistics, "now_ns", itertools.count(0, 10_000).__next__)

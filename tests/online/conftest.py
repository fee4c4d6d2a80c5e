"""One thread: the same sums in the same order; steady costs and one seed: the same evictions in every run."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide.dynamic import statistics
from tests.support.fixtures import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def _steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator seems to take equally long, so that what is evicted does not depend on how busy the machine is."""
    monkeypatch.setattr(statistics, "now_ns", itertools.count(0, 10_000).__next__)


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    """Whether a program exits early, say, depends on its parameters."""
    torch.manual_seed(0)

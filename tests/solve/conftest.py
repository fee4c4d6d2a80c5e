"""Planners as they are: searches of their default effort."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def brief_searches() -> None:
    """No search is cut short."""

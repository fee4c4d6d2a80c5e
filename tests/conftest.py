"""Settings that must stand before torch is imported, and what the mark ``gpu`` means."""

from __future__ import annotations

import os

import pytest

# Tests are of planners as they are, not of plans made before.
os.environ.setdefault("LOWTIDE_PLAN_CACHE", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Settings that must stand before torch is imported, and what the mark ``gpu`` means."""

from __future__ import annotations

import os

import pytest

# Tests are of planners as they are, not of plans made before.
os.environ.setdefault("LOWTIDE_PLAN_CACHE", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return  # most folders below ir and solve do without torch

    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

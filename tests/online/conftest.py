"""One thread: the same sums in the same order. What exists before the tests is kept out of every garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _quick_collections() -> Iterator[None]:
    """Every measurement collects garbage first; the modules of torch are a large heap to walk."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()

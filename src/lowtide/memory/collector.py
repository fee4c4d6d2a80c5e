"""Python's collector of reference cycles, held back for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_held() -> Iterator[None]:
    """Inside, cycles are not collected; afterwards they are where they were before."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def collect_young() -> None:
    """Free what was made lately and refers to itself in circles, as traces and their errors do: it may hold tensors."""
    gc.collect(1)

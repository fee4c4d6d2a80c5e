"""Memory that runs out: a limit below PyTorch's CPU allocator, of which what runs knows nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from lowtide.memory import cpu_allocator


@contextlib.contextmanager
def memory_of(nbytes: int) -> Iterator[None]:
    """Inside, this thread may hold so much more than now: what it asks for beyond is refused, as where no memory is left."""
    counter = cpu_allocator.install()
    assert counter is not None
    before, counter.limited_thread = counter.limited_thread, threading.get_ident()
    counter.limit(counter.level_bytes + nbytes, lambda wanted: False)
    try:
        yield
    finally:
        counter.limit(None)
        counter.limited_thread = before

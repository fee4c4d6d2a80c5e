"""Making room before memory is taken.

On the CPU the counter under PyTorch's allocator asks for room at the very allocation that would exceed the limit: the
outputs and the scratch of an operator alike, to the byte, known before or not. Elsewhere room for the whole operator is made
before it starts, from what was observed for its signature, or at first sight from the shapes that it will return.
"""

from __future__ import annotations

import sys
import threading

from lowtide.dynamic.engine import Engine
from lowtide.runtime.cpu_allocator import AllocationCounter


class Refusal:
    """An allocation that could not be granted: what was asked for, and what was in use, in bytes above the base."""

    def __init__(self, wanted_bytes: int, used_bytes: int) -> None:
        self.wanted_bytes = wanted_bytes
        self.used_bytes = used_bytes


class AllocatorRoom:
    """The limit on the level of the CPU allocator, for the threads that run operators under the engine, one at a time."""

    def __init__(self, engine: Engine, counter: AllocationCounter) -> None:
        self.engine = engine
        self.counter = counter
        self.limit_bytes: int | None = None
        self.refusal: Refusal | None = None
        self.interruption: BaseException | None = None
        self.thread = 0
        engine.free_bytes = self.free_bytes

    def free_bytes(self) -> int:
        """How far the level is below the limit."""
        return sys.maxsize if self.limit_bytes is None else self.limit_bytes - self.counter.level_bytes

    @property
    def level_bytes(self) -> int:
        return self.counter.level_bytes

    def hold(self, limit_bytes: int | None) -> None:
        """Keep the allocator's level at or below the limit from now on; ``None``: no limit."""
        self.limit_bytes = limit_bytes
        self.counter.limit(limit_bytes, None if limit_bytes is None else self._make)

    def enter_thread(self) -> None:
        """The calling thread is the one that the limit speaks to."""
        self.thread = threading.get_ident()
        self.counter.limited_thread = self.thread

    def make(self, wanted_bytes: int) -> bool:
        """Evict until so many bytes can be allocated; false where that cannot be."""
        limit = self.limit_bytes
        while limit is not None and self.counter.level_bytes + wanted_bytes > limit:
            if not self.engine.evict_one():
                self.refusal = Refusal(wanted_bytes, self.counter.level_bytes)
                return False
        return True

    def _make(self, wanted_bytes: int) -> bool:
        try:
            with self.engine.lock:
                return self.make(wanted_bytes)
        except BaseException as error:  # noqa: BLE001 (C++ cannot carry it; whoever ran the operator raises it again)
            self.interruption = error
            return False

    def failure(self) -> tuple[BaseException | None, Refusal | None]:
        """What happened inside the allocator since the last call, if anything."""
        seen = self.interruption, self.refusal
        self.interruption = self.refusal = None
        return seen

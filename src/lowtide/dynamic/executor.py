"""Running operators within the limit: here where the allocator itself asks for room, in ``prediction`` elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from lowtide.dynamic import statistics
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.operators import Operator
from lowtide.memory.cpu_allocator import AllocationCounter


class Executor:
    """Runs operators once everything that they read is in place, in one thread at a time.

    On the CPU the counter under PyTorch's allocator asks for room at the very allocation that would exceed the limit: the
    outputs and the scratch of an operator alike, to the byte, known before or not.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.counter = memory.meter if isinstance(memory.meter, AllocationCounter) else None
        self.thread = 0

    def hold(self, limit_bytes: int | None) -> None:
        """Keep the allocator's level at or below the limit from now on; ``None``: no limit."""
        self.memory.limit_bytes = limit_bytes
        if self.counter is not None:
            self.counter.limit(limit_bytes, None if limit_bytes is None else self._make_room)

    def enter_thread(self) -> None:
        """The calling thread is the one that the limit speaks to."""
        self.thread = threading.get_ident()
        if self.counter is not None:
            self.counter.limited_thread = self.thread

    def run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What the operator returns, and the nanoseconds that it took without the evictions that it asked for."""
        counters = self.memory.counters
        evict_ns = counters.evict_ns
        began = statistics.now_ns()
        result = operator.run(*args, **kwargs)
        return result, statistics.now_ns() - began - (counters.evict_ns - evict_ns)

    def _make_room(self, wanted_bytes: int) -> bool:
        try:
            with self.memory.lock:
                return self.memory.make_room(wanted_bytes)
        except BaseException as error:  # noqa: BLE001 (C++ cannot carry it; whoever ran the operator raises it again)
            self.memory.interruption = error
            return False

"""What was rebuilt for others and is not needed any more, where a program goes on above its budget.

There nothing else is evicted, since computing again took most of the time: what the program lets go and what it reads again is
all that changes. What was rebuilt on the way to something else stays as long as that could go again, so that it piled up to all
that a step computes in its course. Where all that is computed from it is there, it goes without being missed.
"""

from __future__ import annotations

from typing import Protocol

from lowtide.dynamic import statistics
from lowtide.dynamic.node import Node
from lowtide.memory.allocators import Meter

_PARTS = 16  # of the budget; by one of them the level rises until idle storages are looked for again


class Rebuilt(Protocol):
    """What is asked of the memory of a run."""

    intermediates: dict[Node, None]
    meter: Meter

    def evict_counted(self, node: Node, began_ns: int) -> None: ...


class Idle:
    """Finds such storages now and then, not for each allocation. ``budget_bytes``: above what was there before."""

    def __init__(self, budget_bytes: int) -> None:
        self._step_bytes = budget_bytes // _PARTS
        self._from_bytes = 0

    def evict(self, memory: Rebuilt) -> bool:
        """Empty them; whether there were any."""
        level_bytes = memory.meter.level_bytes
        if level_bytes < self._from_bytes:
            # Other threads may have let go of much.
            self._from_bytes = min(self._from_bytes, level_bytes + self._step_bytes)
            return False
        idle = [
            node for node in memory.intermediates if not node.locks and all(child.resident for child in node.children)
        ]
        for node in idle:
            memory.evict_counted(node, statistics.now_ns())
        self._from_bytes = memory.meter.level_bytes + self._step_bytes
        return bool(idle)

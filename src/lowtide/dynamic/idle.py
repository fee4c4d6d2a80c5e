"""Evicts intermediates of rebuilds that are no longer needed, when a program runs above its budget.

In that state nothing else is evicted, since recomputation took most of the time. A storage that was rebuilt only to compute
others is otherwise kept as long as one of those could be evicted again, so that they would pile up to everything that a step
computes. If everything computed from it is resident, it can be evicted without being missed.
"""

from __future__ import annotations

from typing import Protocol

from lowtide.dynamic import statistics
from lowtide.dynamic.node import Node
from lowtide.memory.allocators import Meter

_PARTS = 16  # share of the budget by which the level rises before the next search


class Rebuilt(Protocol):
    """The part of ``Memory`` that is used here."""

    intermediates: dict[Node, None]
    meter: Meter

    def evict_counted(self, node: Node, began_ns: int) -> None: ...


class Idle:
    """Evicts idle storages from time to time, not at each allocation. ``budget_bytes``: above the level on entry."""

    def __init__(self, budget_bytes: int) -> None:
        self._step_bytes = budget_bytes // _PARTS
        self._from_bytes = 0

    def evict(self, memory: Rebuilt) -> bool:
        """Evict idle storages if the level has risen enough; return whether any were evicted."""
        level_bytes = memory.meter.level_bytes
        if level_bytes < self._from_bytes:
            # Other threads may have freed much.
            self._from_bytes = min(self._from_bytes, level_bytes + self._step_bytes)
            return False
        idle = [
            node for node in memory.intermediates if not node.locks and all(child.resident for child in node.children)
        ]
        for node in idle:
            memory.evict_counted(node, statistics.now_ns())
        self._from_bytes = memory.meter.level_bytes + self._step_bytes
        return bool(idle)

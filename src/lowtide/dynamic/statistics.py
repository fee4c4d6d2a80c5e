"""What a live run has done so far, and the clock that it is timed by."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

now_ns = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class OnlineStatistics:
    """What a context did. Times in nanoseconds of wall time; bytes above the level at which the context was entered.

    ``operators`` and ``operator_ns``: run for the program, recomputation not counted. ``copies``: old contents kept because
    what had been computed from them could not be rebuilt before they changed.
    """

    budget_bytes: int
    peak_bytes: int
    operators: int
    operator_ns: int
    evictions: int
    evicted_bytes: int
    evict_ns: int
    rematerializations: int
    rematerialize_ns: int
    copies: int

    @property
    def overhead_percent(self) -> float:
        """Time spent on evicting and rebuilding, over the time of the program's own operators."""
        return 100.0 * (self.evict_ns + self.rematerialize_ns) / max(self.operator_ns, 1)


@dataclass(slots=True)
class Counters:
    """The counts of ``OnlineStatistics`` since the outermost context was entered."""

    operators: int = 0
    operator_ns: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    evict_ns: int = 0
    rematerializations: int = 0
    rematerialize_ns: int = 0
    copies: int = 0

    def copy(self) -> Counters:
        return dataclasses.replace(self)

    def since(self, before: Counters) -> dict[str, int]:
        """By name, what has been added."""
        return {
            field.name: getattr(self, field.name) - getattr(before, field.name) for field in dataclasses.fields(self)
        }

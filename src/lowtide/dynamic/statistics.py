"""What a live run has done so far, and the clock that it is timed by."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

now_ns = time.perf_counter_ns


@dataclass(slots=True)
class OnlineStatistics:
    """What a context did. Times in nanoseconds of wall time; bytes above the level at which the context was entered.

    ``operators`` and ``operator_ns``: run for the program, recomputation not counted. ``copies``: old contents kept because
    what had been computed from them could not be rebuilt before they changed. ``followed``: of the operators, those that ran
    where a plan said what goes and what comes back; ``planned_evictions``: of the evictions, those that a plan said.
    """

    budget_bytes: int = 0
    peak_bytes: int = 0
    operators: int = 0
    operator_ns: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    evict_ns: int = 0
    rematerializations: int = 0
    rematerialize_ns: int = 0
    copies: int = 0
    followed: int = 0
    planned_evictions: int = 0

    @property
    def overhead_percent(self) -> float:
        """Time spent on evicting and rebuilding, over the time of the program's own operators."""
        return 100.0 * (self.evict_ns + self.rematerialize_ns) / max(self.operator_ns, 1)

    def since(self, before: OnlineStatistics, budget_bytes: int, peak_bytes: int) -> OnlineStatistics:
        """What has been counted since ``before``, in a context of this budget and peak."""
        names = [field.name for field in dataclasses.fields(self)][2:]
        counts = [getattr(self, name) - getattr(before, name) for name in names]
        return OnlineStatistics(budget_bytes, peak_bytes, *counts)

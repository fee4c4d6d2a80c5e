"""Counters of an online run, and its clock."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from lowtide.notebook import Shown
from lowtide.report.tables import fact_lines
from lowtide.units import format_bytes, format_percent, format_time

_GRACE_NS, _MOST_AGAIN = 2_000_000_000, 20
now_ns = time.perf_counter_ns


@dataclass(slots=True)
class OnlineStatistics(Shown):
    """Counters of a context. Times in nanoseconds of wall time; bytes above the level at which the context was entered.

    ``operators`` and ``operator_ns``: the program's own operators, without recomputation. ``copies``: old contents kept because
    their dependents could not be rebuilt before they were overwritten. ``followed``: of the operators, those that ran under a
    plan; ``planned_evictions``: of the evictions, those made by a plan.
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

    def hardly_goes_on(self, began_ns: int | None) -> bool:
        """Whether recomputation has taken ``_MOST_AGAIN`` times the operators' time plus ``_GRACE_NS``. ``began_ns``: start of
        the rebuild under way, if any."""
        more_ns = 0 if began_ns is None else now_ns() - began_ns
        return self.rematerialize_ns + more_ns > _GRACE_NS + _MOST_AGAIN * self.operator_ns

    def __str__(self) -> str:
        return "\n".join([self._heading(), *fact_lines(self._facts())])

    def _heading(self) -> str:
        return "online run"

    def _facts(self) -> dict[str, str]:
        evicted = f"{self.evictions} ({format_bytes(self.evicted_bytes)}), in {format_time(self.evict_ns)}"
        return {
            "budget": format_bytes(self.budget_bytes),
            "peak": format_bytes(self.peak_bytes),
            "operators": f"{self.operators}, in {format_time(self.operator_ns)}",
            "evictions": evicted,
            "rematerializations": f"{self.rematerializations}, in {format_time(self.rematerialize_ns)}",
            "copies": str(self.copies),
            "overhead": format_percent(self.overhead_percent / 100),
        }

    def since(self, before: OnlineStatistics, budget_bytes: int, peak_bytes: int) -> OnlineStatistics:
        """Return the counts since ``before``, for a context of this budget and peak."""
        names = [field.name for field in dataclasses.fields(self)][2:]
        counts = [getattr(self, name) - getattr(before, name) for name in names]
        return OnlineStatistics(budget_bytes, peak_bytes, *counts)

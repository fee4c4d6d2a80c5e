"""What ``max_batch`` answers."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning import Plan
from lowtide.report.tables import fact_lines
from lowtide.units import format_bytes, format_percent


@dataclass(frozen=True, slots=True, eq=False)
class MaxBatch:
    """The largest batches that train inside ``budget_bytes`` (``total``: of everything, else of the pass alone).

    ``batch_without`` is the largest without lowtide, 0 where not even one sample fits. ``plan`` is the plan for ``batch``, its
    peak and overhead predicted; ``measured_peak_bytes`` that of one real step, ``None`` where the device had no room for it.
    ``limited``: larger batches were not tried.
    """

    batch: int
    batch_without: int
    budget_bytes: int
    total: bool
    plan: Plan
    measured_peak_bytes: int | None
    limited: bool

    @property
    def gain(self) -> float:
        """How many times larger the batch is; infinite where nothing fits without lowtide."""
        return self.batch / self.batch_without if self.batch_without else float("inf")

    @property
    def predicted_peak_bytes(self) -> int:
        return self.plan.peak_bytes

    @property
    def overhead(self) -> float:
        """Extra time of a step at ``batch`` over the same step without recomputation, as a fraction."""
        return self.plan.overhead

    def __str__(self) -> str:
        whole = " (the most that was tried)" if self.limited else ""
        found = self.measured_peak_bytes
        measured = "not measured: no room on this device" if found is None else f"measured {format_bytes(found)}"
        kind = "in all" if self.total else "for the pass"
        facts = {
            "largest batch": f"{self.batch}{whole}",
            "  without": str(self.batch_without),
            "  budget": f"{format_bytes(self.budget_bytes)} {kind}",
            "  peak": f"{format_bytes(self.plan.peak_bytes)} for the pass, {measured}",
            "  overhead": format_percent(self.overhead),
        }
        return "\n".join(fact_lines(facts, indent=""))

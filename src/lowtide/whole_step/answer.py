"""The answer of ``fits``: whether a training step fits a device, what takes its memory, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lowtide.ir import plain_time_ns, simulate
from lowtide.notebook import Shown
from lowtide.planning import Plan
from lowtide.report.tables import fact_lines
from lowtide.report.text import moved_text
from lowtide.units import format_bytes, format_percent
from lowtide.whole_step.ranked import RankedPass
from lowtide.whole_step.stage import Stage


@dataclass(frozen=True, slots=True, eq=False)
class Fit(Shown):
    """Whether a training step fits ``capacity_bytes``, of which ``reserve_bytes`` stay free, and what it takes. All
    amounts in bytes.

    ``pass_bytes``: the peak of a forward and backward pass without recomputation, including ``gradient_bytes``.
    ``plan``: a plan for the remaining memory; ``None`` if none was found, and then ``least_bytes`` is the smallest
    known peak of a pass. ``largest``: the largest tensors at the peak without a plan. ``samples``: the first size of
    the first input. ``mesh``: the mesh that the model is spread over; then all bytes are those of one rank, and
    ``passes`` are its passes by how they run. ``inside``: parameters are updated inside the backward pass, because the
    step does not fit otherwise; ``moved_bytes`` of the optimizer's state lie in the host's memory between updates.
    ``stage``: the pipeline stage that the model is; then passes are those of a micro-batch, and their bytes those of
    all in flight. Times are modelled, not measured.
    """

    model: str
    device: str
    capacity_bytes: int
    reserve_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    optimizer: str
    optimizer_bytes: int
    gradient_bytes: int
    pass_bytes: int
    least_bytes: int
    plan: Plan | None
    largest: tuple[tuple[str, int], ...]
    samples: int
    mesh: str = ""
    passes: tuple[tuple[str, RankedPass], ...] = ()
    inside: bool = False
    moved_bytes: int = 0
    stage: Stage | None = None

    def __bool__(self) -> bool:
        """Whether it fits, with a plan or without."""
        return self.plan is not None

    @property
    def resident_bytes(self) -> int:
        """Bytes that exist outside the pass."""
        states = self.optimizer_bytes - self.moved_bytes
        kept = 0 if self.stage is None else self.stage.kept_bytes
        return self.parameter_bytes + self.buffer_bytes + self.input_bytes + kept + states

    @property
    def room_bytes(self) -> int:
        """Bytes left for the pass."""
        return self.capacity_bytes - self.reserve_bytes - self.resident_bytes

    @property
    def without_bytes(self) -> int:
        """Bytes of the whole step without lowtide, without the reserve."""
        return self.resident_bytes + self.moved_bytes + self.pass_bytes

    @property
    def fits_without(self) -> bool:
        """Whether it fits as it is, without lowtide."""
        return self.without_bytes <= self.capacity_bytes - self.reserve_bytes

    @property
    def tightest(self) -> Fit:
        """Itself; for a pipeline, the stage that fits least."""
        return self

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the pass with the plan, including all in flight; ``None`` without a plan."""
        return None if self.plan is None else self.plan.peak_bytes + self.plan.waiting_bytes

    @property
    def overhead(self) -> float | None:
        """Extra time of a step with the plan, as a fraction; ``None`` without a plan."""
        return None if self.plan is None else self.plan.overhead

    @property
    def missing_bytes(self) -> int:
        """Additional bytes that the smallest known step needs; 0 if it fits."""
        return 0 if self.plan is not None else max(self.least_bytes - self.room_bytes, 1)

    @property
    def _search(self) -> str:
        return "lowtide plan --largest" if self.mesh else "lowtide.max_batch"

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, or what would make it fit."""
        if self.fits_without:
            left = self.room_bytes - self.pass_bytes
            return (f"fits as it is; {format_bytes(left)} are left, say for a larger batch ({self._search})",)
        if self.plan is not None:
            given = f"budget={self.plan.budget_bytes}"
            if self.plan.in_flight > 1:
                given = f"budget={self.plan.budget_bytes + self.plan.waiting_bytes}, in_flight={self.plan.in_flight}"
            if self.inside:
                offload = ', offload="cpu"' if self.moved_bytes or self.plan.schedule.moves else ""
                given = f"total_budget={self.capacity_bytes - self.reserve_bytes}, optimizer=optimizer{offload}"
            return (
                f"lowtide.rematerialize(model, ..., {given}) makes it fit, for about {_more_time(self.plan.overhead)}",
            )
        return (*self._advice_where_nothing_fits(), f"a device with {format_bytes(self.missing_bytes)} more")

    def _advice_where_nothing_fits(self) -> Iterable[str]:
        lasting = 0 if self.inside else self.gradient_bytes
        activations, room = self.least_bytes - lasting, self.room_bytes - lasting
        batch = self.samples * room // max(activations, 1)
        if 0 < batch < self.samples:
            yield f"about {batch} samples instead of {self.samples} ({self._search} finds how many exactly)"
        if self.optimizer_bytes - self.moved_bytes >= self.missing_bytes:
            yield (
                f"an optimizer that keeps less: the state of {self.optimizer} is {format_bytes(self.optimizer_bytes)}, that of "
                "SGD without momentum nothing"
            )
        if self.parameter_bytes + self.gradient_bytes >= 2 * self.missing_bytes:
            yield "parameters and gradients in half the precision"
        if self.reserve_bytes >= self.missing_bytes:
            yield f"a smaller reserve than {format_bytes(self.reserve_bytes)}, where the device has nothing else to hold"

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        apart = ("plan", "largest", "passes", "stage")
        numbers = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        return {
            **numbers,
            "fits": bool(self),
            "fits_without": self.fits_without,
            "room_bytes": self.room_bytes,
            "missing_bytes": self.missing_bytes,
            "peak_bytes": self.peak_bytes,
            "overhead": self.overhead,
            "stage": None if self.stage is None else asdict(self.stage) | {"in_flight": self.stage.in_flight},
            "passes": {name: each.to_json() for name, each in self.passes},
            "largest": [{"tensor": name, "bytes": size} for name, size in self.largest],
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        return "\n".join([self._heading(), *fact_lines(self._facts())])

    def _heading(self) -> str:
        verdict = "fits" if self.fits_without else "fits with a plan" if self.plan else "does not fit"
        room = format_bytes(self.capacity_bytes - self.reserve_bytes)
        spread = f", spread over {self.mesh}," if self.mesh else ""
        if self.stage is not None:
            spread = f", stage {self.stage.number}{spread}"
        return f"{self.model}{spread} {verdict} on {self.device}: {format_bytes(self.without_bytes)} without a plan, of {room}"

    def _facts(self) -> Mapping[str, str]:
        least = f", at least {format_bytes(self.least_bytes)} with one" if self.plan is None else ""
        away = (
            f", {format_bytes(self.moved_bytes)} of it in the host's memory between updates" if self.moved_bytes else ""
        )
        where = away + (", inside of the backward pass" if self.inside else "")
        facts = {
            "parameters": format_bytes(self.parameter_bytes),
            "buffers": format_bytes(self.buffer_bytes),
            "inputs": format_bytes(self.input_bytes),
            "optimizer": f"{format_bytes(self.optimizer_bytes)} ({self.optimizer}){where}",
            **({} if self.stage is None else {"pipeline": str(self.stage)}),
            "gradients": format_bytes(self.gradient_bytes),
            "pass": f"{format_bytes(self.pass_bytes)} without a plan, gradients among them{least}",
            "left for it": format_bytes(max(self.room_bytes, 0)),
        }
        if self.plan is not None:
            peak, overhead = format_bytes(self.peak_bytes or 0), _more_time(self.plan.overhead)
            plain_ns = max(plain_time_ns(self.plan.graph, self.plan.costs), 1)
            bound = _more_time((self.plan.lower_bound_ns or 0) / plain_ns - 1)
            proven = "" if self.plan.lower_bound_ns is None else f", at best {bound}"
            facts["with a plan"] = f"{peak} for the pass, {overhead}{proven}"
            if self.plan.schedule.moves:
                timing = simulate(self.plan.graph, self.plan.costs, self.plan.schedule).timing
                facts["transfers"] = moved_text(timing)
        facts |= {f"pass {name}": str(each) for name, each in self.passes}
        for n, (name, size) in enumerate(self.largest, 1):
            facts[f"largest tensor {n}"] = f"{format_bytes(size)} {name}"
        return facts | {f"advice {n}": text for n, text in enumerate(self.advice, 1)}


def _more_time(overhead: float) -> str:
    """The overhead as text. It is negative if a plan hides collectives that the pass without a plan waits for."""
    return f"{format_percent(abs(overhead))} {'less' if overhead < 0 else 'more'} time"

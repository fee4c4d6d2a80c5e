"""All content of a report, from one saved file: a plan, or the trace of an online run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.errors import LowtideError, PlanError
from lowtide.memory.measurement import Measurement
from lowtide.place import CudaMemory
from lowtide.report.curve import Curve, CurvePoint
from lowtide.report.memory_map import MemoryMap
from lowtide.report.modules import ModuleRow, rows_of
from lowtide.report.profile import StepProfile
from lowtide.report.replay import ENDLESS_BYTES, replay
from lowtide.trace import Constant, ReplayStatus, Trace, simulate
from lowtide.units import overhead

_LOGGER = logging.getLogger(__name__)
_SHARES = (100, 90, 80, 70, 60, 50, 40, 30, 20)  # budgets of a trace's curve, in percent of the peak
_MOST_SLOWDOWN = 3  # a trace's curve ends beyond it


@dataclass(frozen=True, slots=True)
class Report:
    """``run`` within ``budget_bytes``, ``plain`` the same step without a limit, ``base_ns`` the time of all operators
    once.

    ``heading`` and ``details`` are for the text. ``decided_by``: the planner or heuristic. ``rows``: what is saved and
    recomputed per ``unit`` (``module`` or ``operator``). ``lower_bound_ns``: no schedule within the budget takes less,
    if known. ``beside``: other bytes by name, such as optimizer states. ``memory_map`` makes the map of addresses, and
    ``cuda`` what the step takes on a CUDA device without these addresses, with native and with expandable segments.
    Both take seconds, and are ``None`` for a recorded run.
    """

    title: str
    heading: str
    run: StepProfile
    plain: StepProfile
    base_ns: int
    budget_bytes: int
    decided_by: str
    device: str
    unit: str
    rows: list[ModuleRow]
    details: dict[str, str]
    lower_bound_ns: int | None = None
    curve: Curve | None = None
    measured: Measurement | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    memory_map: Callable[[], MemoryMap] | None = None
    cuda: Callable[[], tuple[CudaMemory, CudaMemory]] | None = None

    @property
    def end_ns(self) -> int:
        """The end of the longer of the two runs, at least 1."""
        return max(self.run.time_ns, self.plain.time_ns, 1)

    def found_map(self) -> MemoryMap | None:
        """The map; ``None`` for a recorded run, and, with a warning, if there are too many tensors to place."""
        try:
            return self.memory_map() if self.memory_map is not None else None
        except PlanError as error:
            _LOGGER.warning("the report has no addresses: %s", error)
            return None

    @property
    def overhead(self) -> float:
        """Extra time of the run, as a fraction."""
        return overhead(self.run.time_ns, self.base_ns)

    @property
    def least_overhead(self) -> float | None:
        """A lower bound on the overhead of all schedules within the budget, if known."""
        if self.lower_bound_ns is None or not self.base_ns:
            return None
        return overhead(self.lower_bound_ns, self.base_ns)


def report_of_trace(
    trace: Trace,
    budget_bytes: int | None = None,
    heuristic: str = "dtr-eq",
    measured: Measurement | None = None,
    *,
    name: str = "",
) -> Report:
    """The recorded program, replayed within a budget: by default the one of the recorded run.

    As in an online run, bytes are those above the level at the start, so constants take none. Raises ``LowtideError``
    if the budget is not known, or if the replay runs out of memory.
    """
    trace = without_constants(trace)
    plain, _ = replay(trace, ENDLESS_BYTES, heuristic)
    budget = budget_bytes or trace.budget_bytes
    if budget is None:
        raise PlanError('the recorded run had no budget; give one, such as --budget "50%".')
    run, result = replay(trace, budget, heuristic)
    if result.status is not ReplayStatus.OK:
        raise LowtideError(
            f"replayed within {budget} bytes, {result.operator} has nothing left to evict; give a larger --budget "
            f"(without evictions the program needs {plain.peak_bytes} bytes)."
        )
    title = trace.name or name or "trace"
    rows = rows_of(run, ((span.target, span.time_ns) for span in plain.spans), "operator")
    return Report(
        title=title,
        heading=f"replay of {title}: {len(plain.spans)} operators",
        run=run,
        plain=plain,
        base_ns=plain.time_ns,
        budget_bytes=budget,
        decided_by=f"{heuristic}, policy eager",
        device=trace.device,
        unit="operator",
        rows=sorted(rows, key=lambda row: -row.recomputed_ns),
        details={"rematerializations": str(sum(span.again for span in run.spans)), "heuristic": heuristic},
        curve=_trace_curve(trace, plain, heuristic, CurvePoint(budget, run.peak_bytes, run.time_ns)),
        measured=measured,
    )


def without_constants(trace: Trace) -> Trace:
    """The trace with constants of 0 bytes."""
    events = tuple(Constant(event.tensor, 0) if isinstance(event, Constant) else event for event in trace.events)
    return dataclasses.replace(trace, events=events)


def _trace_curve(trace: Trace, plain: StepProfile, heuristic: str, own: CurvePoint) -> Curve:
    """Replays at several budgets, until one runs out of memory or takes too long."""
    whole = plain.peak_bytes
    points = {own.budget_bytes: own} if own.budget_bytes <= whole else {}
    for share in _SHARES:
        budget = whole * share // 100
        result = simulate(trace, budget, heuristic, most_slowdown=_MOST_SLOWDOWN)
        if result.status is not ReplayStatus.OK:
            break
        points[budget] = CurvePoint(budget, result.peak_bytes, result.time_ns)
    ordered = sorted(points.values(), key=lambda point: -point.budget_bytes) or [own]
    return Curve(whole, plain.time_ns, 0, f"{heuristic}, eager", tuple(ordered))


def artefact_name(path: str | Path) -> str:
    """``artefact_name("runs/gpt2.trace.jsonl.gz") == "gpt2"``: a title for a file without one."""
    return Path(path).name.partition(".")[0]

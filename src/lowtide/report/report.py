"""Everything that a report tells, gathered from one saved artefact: a plan, or the trace of an online run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import LowtideError, PlanError
from lowtide.ir import Kind, keep_all_schedule
from lowtide.memory.measurement import Measurement
from lowtide.report.curve import Curve, CurvePoint
from lowtide.report.modules import ModuleRow, module_rows
from lowtide.report.profile import StepProfile, profile_of_schedule
from lowtide.report.replay import ENDLESS_BYTES, replay
from lowtide.report.tables import fact_lines
from lowtide.report.text import Planned, render_plan
from lowtide.trace import Constant, ReplayStatus, Trace
from lowtide.units import format_bytes, format_percent, format_source, format_time

_SHARES = (100, 90, 80, 70, 60, 50, 40, 30, 20)  # of the peak: the budgets of a trace's curve
_MOST_SLOWDOWN = 3  # beyond it a trace's curve ends


@dataclass(frozen=True, slots=True)
class Report:
    """``run`` within ``budget_bytes``, ``plain`` the same step without a limit.

    ``decided_by``: the planner or heuristic. ``rows``: what is saved and recomputed per ``unit`` (``module`` or ``operator``).
    ``lower_bound_ns``: no schedule within the budget takes less, where known. ``text``: the report in words.
    """

    title: str
    run: StepProfile
    plain: StepProfile
    budget_bytes: int
    decided_by: str
    device: str
    unit: str
    rows: tuple[ModuleRow, ...]
    text: str
    lower_bound_ns: int | None = None
    curve: Curve | None = None
    measured: Measurement | None = None

    @property
    def overhead(self) -> float:
        """Extra time of the run over the plain one, as a fraction."""
        return self.run.time_ns / self.plain.time_ns - 1 if self.plain.time_ns else 0.0


def report_of_plan(
    plan: Planned, curve: Curve | None = None, measured: Measurement | None = None, *, name: str = ""
) -> Report:
    """``measured``: a step that ran under the plan. ``name`` stands in for a graph without one."""
    run = profile_of_schedule(plan.graph, plan.costs, plan.schedule)
    plain = profile_of_schedule(plan.graph, plan.costs, keep_all_schedule(plan.graph))
    return Report(
        title=plan.graph.name or name or "plan",
        run=run,
        plain=plain,
        budget_bytes=plan.budget_bytes,
        decided_by=f"{plan.planner}, seed {plan.seed}",
        device=plan.costs.device,
        unit="module",
        rows=tuple(module_rows(plan.graph, plan.costs, plan.schedule)),
        text=_text(render_plan(plan), run, curve, measured),
        lower_bound_ns=plan.lower_bound_ns,
        curve=curve,
        measured=measured,
    )


def report_of_trace(
    trace: Trace,
    budget_bytes: int | None = None,
    heuristic: str = "dtr-eq",
    policy: str = "eager",
    measured: Measurement | None = None,
    *,
    name: str = "",
) -> Report:
    """The program as recorded and replayed within a budget, by default the one that the recorded run was held to.

    As in an online run, bytes are those above what was there before: constants take none.
    Raises ``LowtideError`` where the budget is not known, and where the replay runs out of memory.
    """
    trace = without_constants(trace)
    plain = replay(trace, ENDLESS_BYTES, heuristic, policy).profile
    budget = budget_bytes or trace.budget_bytes
    if budget is None:
        raise PlanError('the recorded run had no budget; give one, such as --budget "50%".')
    replayed = replay(trace, budget, heuristic, policy)
    if replayed.result.status is not ReplayStatus.OK:
        raise LowtideError(
            f"replayed within {budget} bytes, {replayed.result.operator} has nothing left to evict; give a larger --budget "
            f"(without evictions the program needs {plain.peak_bytes} bytes)."
        )
    run = replayed.profile
    curve = _trace_curve(trace, plain, heuristic, policy, CurvePoint(budget, run.peak_bytes, run.time_ns))
    title = trace.name or name or "trace"
    return Report(
        title=title,
        run=run,
        plain=plain,
        budget_bytes=budget,
        decided_by=f"{heuristic}, policy {policy}",
        device=trace.device,
        unit="operator",
        rows=_operator_rows(run),
        text=_text(_trace_text(title, run, plain, budget, heuristic), run, curve, measured),
        curve=curve,
        measured=measured,
    )


def _text(summary: str, run: StepProfile, curve: Curve | None, measured: Measurement | None) -> str:
    parts = [summary, _alive_text(run)]
    parts += [str(curve)] if curve is not None else []
    parts += [measured_text(run, measured)] if measured is not None else []
    return "\n\n".join(parts) + "\n"


def without_constants(trace: Trace) -> Trace:
    """The trace with constants of no bytes."""
    events = tuple(Constant(event.tensor, 0) if isinstance(event, Constant) else event for event in trace.events)
    return dataclasses.replace(trace, events=events)


def _trace_curve(trace: Trace, plain: StepProfile, heuristic: str, policy: str, own: CurvePoint) -> Curve:
    """Replays at several budgets, until one runs out of memory or takes too long."""
    whole = plain.peak_bytes
    points = {own.budget_bytes: own} if own.budget_bytes <= whole else {}
    for share in _SHARES:
        budget = whole * share // 100
        result = replay(trace, budget, heuristic, policy).result
        if result.status is not ReplayStatus.OK or result.slowdown > _MOST_SLOWDOWN:
            break
        points[budget] = CurvePoint(budget, result.peak_bytes, result.time_ns)
    ordered = sorted(points.values(), key=lambda point: -point.budget_bytes) or [own]
    return Curve(whole, plain.time_ns, 0, f"{heuristic}, {policy}", tuple(ordered))


def _operator_rows(run: StepProfile) -> tuple[ModuleRow, ...]:
    """A row per kind of operator, by what recomputing it takes."""
    saved: Counter[str] = Counter()
    again: Counter[str] = Counter()
    again_ns: Counter[str] = Counter()
    once_ns: Counter[str] = Counter()
    for block in run.blocks:
        if block.span is not None and block.kind is Kind.TENSOR and block.first < run.boundary <= block.last:
            saved[block.span.target] += block.bytes
    for span in run.spans:
        (again_ns if span.again else once_ns)[span.target] += span.time_ns
        again[span.target] += span.again
    rows = [ModuleRow(name, saved[name], again[name], again_ns[name], once_ns[name]) for name in once_ns]
    return tuple(sorted(rows, key=lambda row: -row.recomputed_ns))


def _trace_text(title: str, run: StepProfile, plain: StepProfile, budget: int, heuristic: str) -> str:
    overhead = run.time_ns / plain.time_ns - 1 if plain.time_ns else 0.0
    facts = {
        "budget": f"{format_bytes(budget)} ({format_percent(budget / max(plain.peak_bytes, 1))} of unconstrained)",
        "peak": format_bytes(run.peak_bytes),
        "unconstrained peak": format_bytes(plain.peak_bytes),
        "overhead": f"{format_percent(overhead)} of {format_time(plain.time_ns)}",
        "rematerializations": str(sum(span.again for span in run.spans)),
        "heuristic": heuristic,
    }
    return "\n".join([f"replay of {title}: {len(plain.spans)} operators", *fact_lines(facts)])


def measured_text(run: StepProfile, measured: Measurement) -> str:
    """Predicted beside measured."""
    facts = {
        "peak": f"{format_bytes(run.peak_bytes)} predicted, {format_bytes(measured.peak_bytes)} measured",
        "time": f"{format_time(run.time_ns)} predicted, {format_time(measured.time_ns)} measured",
    }
    return "\n".join([f"measured on {measured.device}", *fact_lines(facts)])


def _alive_text(run: StepProfile, most: int = 12) -> str:
    """What is there at the peak, the largest first."""
    alive = run.at_peak
    lines = [f"at the peak: {len(alive)} blocks, {format_bytes(sum(block.bytes for block in alive))}"]
    for block in alive[:most]:
        span = block.span
        where = " ".join(filter(None, (span.module, span.name, format_source(span.source)))) if span else block.detail
        lines.append(f"  {format_bytes(block.bytes):>10}  {block.kind.value:<11}  {where}")
    left = alive[most:]
    lines += [f"  {format_bytes(sum(block.bytes for block in left)):>10}  in {len(left)} more"] if left else []
    return "\n".join(lines)


def artefact_name(path: str | Path) -> str:
    """``artefact_name("runs/gpt2.trace.jsonl.gz") == "gpt2"``: a title for what has none."""
    return Path(path).name.partition(".")[0]

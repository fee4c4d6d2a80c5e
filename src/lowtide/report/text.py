"""A plan as a readable table."""

from __future__ import annotations

from typing import Protocol

from lowtide.ir import Compute, Costs, Graph, Schedule, simulate
from lowtide.report.modules import ModuleRow, merge_repeats, module_rows
from lowtide.report.tables import fact_lines, table_lines
from lowtide.units import format_bytes, format_percent, format_time

_MOST_ROWS = 40
_HEADER = ("module", "saved", "recomputed ops", "recompute time", "time once")


class Planned(Protocol):
    """What is told of a plan, see ``lowtide.Plan``."""

    @property
    def graph(self) -> Graph: ...
    @property
    def costs(self) -> Costs: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def planner(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def solve_seconds(self) -> float: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def unconstrained_peak_bytes(self) -> int: ...
    @property
    def lower_bound_ns(self) -> int | None: ...
    @property
    def overhead(self) -> float: ...


def render_plan(plan: Planned) -> str:
    """Budget, predicted peak, overhead, where the peak is, and what is saved and recomputed per module."""
    rows = merge_repeats(module_rows(plan.graph, plan.costs, plan.schedule))
    return "\n".join([*_summary(plan), "", *_table(rows)])


def _summary(plan: Planned) -> list[str]:
    total = max(plan.unconstrained_peak_bytes, 1)
    bound = "none known"
    if plan.lower_bound_ns is not None and plan.costs.total_time_ns:
        bound = format_percent(plan.lower_bound_ns / plan.costs.total_time_ns - 1)
    facts = {
        "budget": f"{format_bytes(plan.budget_bytes)} ({format_percent(plan.budget_bytes / total)} of unconstrained)",
        "predicted peak": f"{format_bytes(plan.peak_bytes)} ({format_percent(plan.peak_bytes / total)})",
        "unconstrained peak": format_bytes(plan.unconstrained_peak_bytes),
        "overhead": f"{format_percent(plan.overhead)} of {format_time(plan.costs.total_time_ns)}",
        "overhead's lower bound": bound,
        "peak at": peak_position(plan),
        "planner": f"{plan.planner}, seed {plan.seed}, {plan.solve_seconds:.1f} s",
        "costs": plan.costs.device or "as given",
    }
    title = f"plan of {plan.graph.name}" if plan.graph.name else "plan"
    return [f"{title}: {len(plan.graph.ops)} ops", *fact_lines(facts)]


def peak_position(plan: Planned) -> str:
    """The op that runs at the predicted peak, its module and the user's source line."""
    step = plan.schedule.steps[simulate(plan.graph, plan.costs, plan.schedule).peak_step]
    if not isinstance(step, Compute):
        return "between two ops"
    op = plan.graph.ops[step.op]
    where = f" of {op.module}" if op.module else ""
    return f"{op.name}{where}, {op.phase.value}" + (f", {op.source}" if op.source else "")


def _table(rows: list[ModuleRow]) -> list[str]:
    lines = table_lines([_HEADER, *(row.cells() for row in rows[:_MOST_ROWS])])
    if left := rows[_MOST_ROWS:]:
        saved, again = sum(row.saved_bytes for row in left), sum(row.recomputed_ns for row in left)
        lines.append(f"and {len(left)} more: {format_bytes(saved)} saved, {format_time(again)} recomputed")
    return lines

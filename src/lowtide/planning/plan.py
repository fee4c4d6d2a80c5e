"""The plan: a graph, its costs, and a schedule that fits a budget; and the file format of plans.

The format is ``lowtide-plan/1``. A saved plan contains everything. If the reader has the program, as in the plan cache
and among the ranks of a training, the graph is left out, and the costs are separate.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lowtide.errors import PlanError, ScheduleError
from lowtide.ir import Costs, Graph, Schedule, check, keep_all_schedule, plain_time_ns, simulate
from lowtide.ir.graph import SEND_GRADIENT_TARGET, STATE_TARGETS
from lowtide.ir.serial import (
    graph_from_json,
    graph_to_json,
    read_json,
    schedule_from_json,
    schedule_to_json,
    second_memory_from_json,
)
from lowtide.ir.simulator import Simulation
from lowtide.memory.measurement import Measurement
from lowtide.place import CudaMemory, Layout, cuda_memory, lay_out
from lowtide.planning.chunked import ChunkedLoss, chunked_losses
from lowtide.planning.form import CostsForm, PlanForm
from lowtide.progress import told
from lowtide.report.curve import CURVE_PLANNER, CURVE_POINTS, Curve, CurvePoint, make_curve
from lowtide.report.html import report_card
from lowtide.report.memory_map import memory_map
from lowtide.report.modules import rows_of
from lowtide.report.profile import profile_of_schedule
from lowtide.report.report import Report
from lowtide.report.text import collectives_text, moved_text, summary_text
from lowtide.report.writers import write_report, writer_of
from lowtide.solve import Progress
from lowtide.store import write_atomically
from lowtide.units import format_bytes, format_percent, overhead

PLAN_FORMAT = "lowtide-plan/1"
_FACTS = (
    "planner", "seed", "budget_bytes", "peak_bytes", "unconstrained_peak_bytes", "time_ns", "lower_bound_ns", "solve_seconds",
)  # fmt: skip


class Improvement(NamedTuple):
    """A plan that was in use: since how many seconds after the first one, and its peak, time and overhead."""

    seconds: float
    peak_bytes: int
    time_ns: int
    overhead: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """A schedule of a training program within a memory budget.

    Bytes are what a forward and backward pass allocates above the level at its start. ``time_ns``: the predicted time
    of the pass; ``lower_bound_ns``: a proven lower bound on it for all schedules within the budget, or ``None``.
    ``solve_seconds``: how long the planner took; ``cached``: whether the plan came from the cache on disk
    (``planning.cache``). ``str(plan)`` is a readable report. ``known_curve``: the result of ``with_curve``, saved with
    the plan. ``history``: the plans in use so far, including this one, if it was improved in the background.
    ``lowered_from_bytes``: the budget as given, if it was lowered because steps ran out of memory, else 0. ``outside``:
    what a total budget counted beside the pass. ``in_flight``: how many calls may wait for their backward pass at once;
    ``waiting_bytes``: what the other calls hold while one runs, plus gradients of earlier ones in parameters (for all
    stages that share a budget).
    """

    graph: Graph
    costs: Costs
    schedule: Schedule
    planner: str
    budget_bytes: int
    peak_bytes: int
    unconstrained_peak_bytes: int
    time_ns: int
    lower_bound_ns: int | None = None
    seed: int = 0
    solve_seconds: float = 0.0
    cached: bool = False
    known_curve: Curve | None = None
    history: tuple[Improvement, ...] = ()
    lowered_from_bytes: int = 0
    outside: str = ""
    in_flight: int = 1
    waiting_bytes: int = 0
    _layout: Layout | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls, graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int, planner: str, seed: int, **facts: Any
    ) -> Plan:
        """The plan for ``schedule``, which is simulated. ``facts``: further fields."""
        run, plain = simulate(graph, costs, schedule), simulate(graph, costs, keep_all_schedule(graph))
        asked = (graph, costs, schedule, planner, budget_bytes)
        return cls(*asked, run.peak_bytes, plain.peak_bytes, run.time_ns, seed=seed, **facts)

    def among(self, in_flight: int, waiting_bytes: int) -> Plan:
        """This plan as that of one of several calls at once."""
        return dataclasses.replace(self, in_flight=in_flight, waiting_bytes=waiting_bytes)

    @property
    def overhead(self) -> float:
        """Extra time over the same program without recomputation, as a fraction."""
        return overhead(self.time_ns, plain_time_ns(self.graph, self.costs))

    @property
    def chunked(self) -> tuple[ChunkedLoss, ...]:
        """The losses computed in pieces (``chunked_loss=True``), and how far they may differ from eager's."""
        return chunked_losses(self.graph)

    @property
    def layout(self) -> Layout:
        """The addresses of the schedule in an arena, without tensors that outlive the step. Computed on first use."""
        if self._layout is None:
            outside = storages_outside(self.graph)
            layout = lay_out(self.graph, self.costs, self.schedule, apart=outside, seed=self.seed)
            object.__setattr__(self, "_layout", layout)
            return layout
        return self._layout

    @property
    def reserved_bytes(self) -> int:
        """Memory that the step takes if every tensor has an address: ``peak_bytes`` plus gaps. Without an arena the
        allocator decides, see ``cuda_memory``."""
        return self.layout.reserved_bytes

    def cuda_memory(self, *, expandable_segments: bool = False) -> CudaMemory:
        """Memory that the step takes on a CUDA device under PyTorch's caching allocator, by a model of it.
        ``expandable_segments``: as with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``. Takes up to some seconds
        for thousands of operators."""
        return cuda_memory(self.graph, self.costs, self.schedule, expandable_segments=expandable_segments)

    @property
    def is_placed(self) -> bool:
        """Whether its addresses fit the budget."""
        return self.reserved_bytes <= self.budget_bytes

    def curve(
        self, *, points: int = CURVE_POINTS, planner: str = CURVE_PLANNER, on_progress: Progress | None = None
    ) -> Curve:
        """Overhead as a function of the budget, from the unconstrained peak to the least budget that ``planner`` meets,
        at ``points`` budgets and this plan's. The default planner takes seconds per point."""
        known = CurvePoint(self.budget_bytes, self.peak_bytes, self.time_ns, self.lower_bound_ns)
        with told(self.graph.name, on_progress) as tell:
            given = (self.graph, self.costs)
            return make_curve(*given, points=points, planner=planner, seed=self.seed, known=[known], on_progress=tell)

    def with_curve(
        self, *, points: int = CURVE_POINTS, planner: str = CURVE_PLANNER, on_progress: Progress | None = None
    ) -> Plan:
        """This plan with its ``curve``, for reports."""
        return dataclasses.replace(
            self, known_curve=self.curve(points=points, planner=planner, on_progress=on_progress)
        )

    def begun(self) -> Plan:
        """This plan as the first of a history."""
        return dataclasses.replace(self, history=(self._as_improvement(0.0),))

    def improved(self, found: Plan, seconds: float, placed: bool = False) -> Plan:
        """``found``, a plan for the same problem, if it is quicker than this one; else this one with the bound, planner
        and search time of ``found``. ``seconds``: since the history began. ``placed``: reject plans whose addresses do
        not fit, unless this one's do not either."""
        fits = not placed or found.is_placed or not self.is_placed
        if found.time_ns < self.time_ns and fits:
            history = (*self.history, found._as_improvement(seconds))
            return dataclasses.replace(
                found, history=history, lowered_from_bytes=self.lowered_from_bytes, outside=self.outside
            )
        bound_ns, seconds = found.lower_bound_ns, found.solve_seconds
        return dataclasses.replace(self, planner=found.planner, lower_bound_ns=bound_ns, solve_seconds=seconds)

    def with_schedule(self, schedule: Schedule, run: Simulation) -> Plan:
        """The plan with a quicker ``schedule``, whose simulation is ``run``."""
        found = dataclasses.replace(self, schedule=schedule, peak_bytes=run.peak_bytes, time_ns=run.time_ns)
        return self.improved(found, self.history[-1].seconds if self.history else 0.0)

    def _as_improvement(self, seconds: float) -> Improvement:
        return Improvement(seconds, self.peak_bytes, self.time_ns, self.overhead)

    def report(self, path: str | Path, measurement: Measurement | None = None) -> None:
        """Write a report of this plan; the extension of ``path`` selects the format, see ``lowtide report``.

        ``measurement``: of a step under the plan, from ``lowtide.measure``. The curve is that of ``with_curve``.
        """
        writer_of(path)  # raise for an unknown extension before other work
        write_report(self.as_report(measurement), path)

    def as_report(self, measurement: Measurement | None = None, *, name: str = "") -> Report:
        """The content of ``report``. ``name`` is used if the graph has no name."""
        graph, costs, decided_by = self.graph, self.costs, f"{self.planner}, seed {self.seed}"
        run = profile_of_schedule(graph, costs, self.schedule)
        at = run.spans[run.peak_index]
        place = f"{at.name} of {at.module}" if at.module else at.name
        details = {
            "peak at": ", ".join(filter(None, (place, "forward" if at.forward else "backward", at.source))),
            "planner": f"{decided_by}, {self.solve_seconds:.1f} s",
            "costs": costs.device or "as given",
        }
        if self.outside:
            details["beside the pass"] = self.outside
        if self.waiting_bytes:
            others, total = format_bytes(self.waiting_bytes), format_bytes(self.peak_bytes + self.waiting_bytes)
            calls = f"{self.in_flight} call{'' if self.in_flight == 1 else 's'}"
            details["in flight"] = f"{calls}; beside one of them {others}, at most {total} together"
        if self.chunked:
            details["loss"] = "; ".join(map(str, self.chunked))
        if self.schedule.moves:
            details["transfers"] = moved_text(simulate(graph, costs, self.schedule).timing)
        if self.costs.collectives_beside:
            moving = {op.target for op in graph.ops}.intersection(STATE_TARGETS)
            what = (
                "moving gradients" if moving == {SEND_GRADIENT_TARGET} else "moving states" if moving else "collectives"
            )
            details[what] = collectives_text(simulate(graph, costs, self.schedule).timing)
        if self.lowered_from_bytes:
            details["budget lowered"] = f"from {format_bytes(self.lowered_from_bytes)}, as a step ran out of memory"
        return Report(
            title=graph.name or name or "plan",
            heading=f"{f'plan of {graph.name}' if graph.name else 'plan'}: {len(graph.ops)} ops",
            run=run,
            plain=profile_of_schedule(graph, costs, keep_all_schedule(graph)),
            base_ns=plain_time_ns(graph, costs),
            budget_bytes=self.budget_bytes,
            decided_by=decided_by,
            device=costs.device,
            unit="module",
            rows=rows_of(run, zip((op.module for op in graph.ops), costs.time_ns.tolist(), strict=True), "module"),
            details=details,
            lower_bound_ns=self.lower_bound_ns,
            curve=self.known_curve,
            measured=measurement,
            memory_map=functools.cache(lambda: memory_map(run, self.layout)),
            cuda=functools.cache(lambda: (self.cuda_memory(), self.cuda_memory(expandable_segments=True))),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as ``lowtide-plan/1`` JSON, atomically."""
        write_atomically(Path(path), msgspec.json.encode(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan, and check and simulate its schedule again. Raises ``PlanError`` if the file is not a plan,
        and ``ScheduleError`` if its schedule is not valid."""
        data = read_json(path)
        if data.get("format") != PLAN_FORMAT:
            raise PlanError(
                f"{path} is not a saved plan: expected format {PLAN_FORMAT!r}, found {data.get('format')!r}."
            )
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def to_json(self, *, graph: bool = True, costs: bool = True) -> dict[str, Any]:
        """A ``lowtide-plan/1`` object, without the ``graph`` or the ``costs`` if the reader has them."""
        data: dict[str, Any] = {"format": PLAN_FORMAT} | {name: getattr(self, name) for name in _FACTS}
        data["schedule"] = schedule_to_json(self.schedule)
        data |= {"outside": self.outside} if self.outside else {}
        if self.waiting_bytes:
            data |= {"in_flight": self.in_flight, "waiting_bytes": self.waiting_bytes}
        if graph:
            data["graph"] = graph_to_json(self.graph, self.costs)
            data["curve"] = None if self.known_curve is None else self.known_curve.to_json()
        elif costs:
            fields = {name: getattr(self.costs, name) for name in CostsForm.__struct_fields__}
            data["costs"] = msgspec.to_builtins(fields, enc_hook=np.ndarray.tolist)
        return data

    @classmethod
    def from_json(cls, data: Any, graph: Graph | None = None, costs: Costs | None = None) -> Plan:
        """Inverse of ``to_json``. ``graph`` and ``costs``: of the program at hand, if the data lack them. Raises
        ``PlanError`` if the data are not a plan, or not one for ``graph``, and ``ScheduleError`` if the schedule is not
        valid, or exceeds the budget on ``graph``."""
        try:
            form = msgspec.convert(data, PlanForm)
        except ValueError as error:
            raise PlanError(f"it is not a complete plan: {error}.") from error
        at_hand = graph is not None
        if graph is None:
            graph, costs = graph_from_json(form.graph)
        elif costs is None:
            costs = _costs(form, graph)
        schedule = schedule_from_json(form.schedule)
        check(graph, schedule)
        kept = ("lower_bound_ns", "solve_seconds", "outside", "in_flight", "waiting_bytes")
        facts = {name: getattr(form, name) for name in kept}
        plan = cls.of(graph, costs, schedule, form.budget_bytes, form.planner, form.seed, **facts)
        if at_hand and plan.peak_bytes > form.budget_bytes:
            raise ScheduleError(f"it peaks at {plan.peak_bytes} bytes, over the budget of {form.budget_bytes}.")
        if form.lower_bound_ns is not None and form.lower_bound_ns > plan.time_ns:
            raise PlanError(f"its schedule takes {plan.time_ns} ns, less than the bound of {form.lower_bound_ns} ns.")
        return dataclasses.replace(plan, known_curve=None if form.curve is None else Curve.from_json(form.curve))

    def __str__(self) -> str:
        return summary_text(self.as_report())

    def __repr__(self) -> str:
        peaks = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.unconstrained_peak_bytes)}"
        return f"<Plan {self.graph.name}: {peaks}, {format_percent(self.overhead)} overhead, {self.planner}>"

    def _repr_html_(self) -> str:
        return report_card(self.as_report())


def storages_outside(graph: Graph) -> frozenset[int]:
    """Storages without a place in an arena: results, which the caller may keep, and the gradients of the results, which
    the caller provides."""
    return frozenset(graph.storages_of((*graph.forward_outputs, *graph.arriving)))


def _costs(form: PlanForm, graph: Graph) -> Costs:
    """The costs in a plan without a graph. Raises ``PlanError`` if they are not for ``graph``."""
    if form.costs is None:
        raise PlanError("the plan has neither a graph nor costs.")
    *columns, second_memory, beside = msgspec.structs.astuple(form.costs)
    memory = second_memory_from_json(second_memory)
    costs = dataclasses.replace(Costs(*columns), second_memory=memory, collectives_beside=beside)
    sizes = [len(column) for column in (costs.time_ns, costs.workspace_bytes, costs.storage_bytes)]
    if sizes != [len(graph.ops), len(graph.ops), len(graph.storages)]:
        raise PlanError("the plan's costs are of another program.")
    return costs

"""The cost of memory: overhead against budget, from the unconstrained peak down to the least budget that is met.

A schedule for a budget fits every larger budget, and a lower bound on the time for a budget holds for every smaller
one. So neither the curve nor its lower bound ever rises with the budget, whatever the planner finds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lowtide.errors import PlanError
from lowtide.ir import Costs, Graph, Schedule, keep_all_schedule, needed_ops, plain_time_ns, simulate
from lowtide.ir.fields import expect_format
from lowtide.notebook import card, note, picture, table
from lowtide.report.svg import SIZES, Chart, Size, read_template, ticks
from lowtide.report.tables import table_lines
from lowtide.solve import Problem, Progress, minimum_peak, peak_lower_bound, solve
from lowtide.store import write_atomically
from lowtide.units import format_bytes, format_percent, overhead

CURVE_FORMAT = "lowtide-curve/1"
CURVE_PLANNER = "auto{effort=1}"
_MOST_POINTS = 1000
CURVE_POINTS = 8
_HEADER = ("budget", "of the peak", "overhead", "lower bound")
_CAPTION = (
    "Line: overhead at each budget. Dashes: no schedule is quicker. Shaded on the right: no schedule peaks that low."
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The quickest known schedule within ``budget_bytes``, and the best known lower bound on its time."""

    budget_bytes: int
    peak_bytes: int
    time_ns: int
    lower_bound_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """``points`` go from the unconstrained peak to the least budget that was met.

    ``base_ns`` is the time without recomputation. No schedule has a peak below ``lower_bound_bytes``. ``str(curve)`` is
    a table.
    """

    unconstrained_peak_bytes: int
    base_ns: int
    lower_bound_bytes: int
    planner: str
    points: tuple[CurvePoint, ...]

    @property
    def minimum_bytes(self) -> int:
        """The least budget that was met."""
        return self.points[-1].budget_bytes

    def overhead(self, time_ns: int) -> float:
        """Extra time over the program without recomputation, as a fraction."""
        return overhead(time_ns, self.base_ns)

    def least_overhead(self, point: CurvePoint) -> float | None:
        """A lower bound on the overhead within the budget of ``point``, if known."""
        return None if point.lower_bound_ns is None else self.overhead(point.lower_bound_ns)

    def to_json(self) -> dict[str, Any]:
        """A ``lowtide-curve/1`` object: the fields of the curve, and for each point also its overheads in percent."""
        points = []
        for point in self.points:
            bound = self.least_overhead(point)
            bound_percent = None if bound is None else 100 * bound
            percentages = {"overhead_percent": 100 * self.overhead(point.time_ns), "lower_bound_percent": bound_percent}
            points.append(dataclasses.asdict(point) | percentages)
        return {"format": CURVE_FORMAT} | dataclasses.asdict(self) | {"points": points}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Curve:
        """Inverse of ``to_json``. Raises ``PlanError`` for anything else."""
        expect_format(data, CURVE_FORMAT)
        try:
            return msgspec.convert(data, cls)
        except ValueError as error:
            raise PlanError(f"the curve is malformed: {error}.") from error

    def save(self, path: str | Path) -> None:
        """Write the curve as ``lowtide-curve/1``."""
        write_atomically(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._rows(), left=0), self.limits()])

    def _repr_html_(self) -> str:
        drawn = picture(self.chart(SIZES[0]), read_template("charts.css"), _CAPTION)
        return card("what each budget costs", table(self._rows(), left=0), note(self.limits()), drawn)

    def chart(self, size: Size, own_bytes: int = 0) -> str:
        """An SVG of overhead in percent against the budget, which shrinks to the right. What no schedule reaches is
        shaded. ``own_bytes``: budget of a point to mark."""
        whole, overheads = self.unconstrained_peak_bytes, [self.overhead(point.time_ns) for point in self.points]
        top = max(1, *(100 * extra for extra in overheads))
        chart = Chart(size, whole, top, reversed_x=True)
        if self.lower_bound_bytes > 0:
            start = chart.x(min(self.lower_bound_bytes, max(whole, 1)))
            width, height = round(chart.x(0) - start, 1), chart.floor - chart.top
            chart.draw("rect", x=start, y=chart.top, width=width, height=height, class_="unreachable")
        across = [(max(whole, 1) * share / 100, f"{share} %") for share in (100, 80, 60, 40, 20, 0)]
        chart.axes(across, ticks(top, size.up, {"%": 1}), "budget, % of the unconstrained peak")

        def place(point: CurvePoint, extra: float) -> tuple[float, float]:
            return chart.x(point.budget_bytes), chart.y(max(100 * extra, 0.0))

        line = list(map(place, self.points, overheads))
        bounds = [(point, self.least_overhead(point)) for point in self.points]
        bound = [place(point, least) for point, least in bounds if least is not None]
        shapes = [("polygon", [*line, *bound[::-1]], "gap"), ("polyline", bound, "bound")] if bound else []
        for name, corners, class_ in [*shapes, ("polyline", line, "plan")]:
            chart.draw(name, points=" ".join(f"{x},{y}" for x, y in corners), class_=class_)
        for point, extra, (x, y) in zip(self.points, overheads, line, strict=True):
            own, percent = point.budget_bytes == own_bytes, format_percent(extra)
            words = f"<title>{format_bytes(point.budget_bytes)}: {percent}</title>"
            chart.draw("circle", words, cx=x, cy=y, r=6 if own else 4, class_="own" if own else "dot")
            if own:
                anchor = "start" if x < size.width * 0.35 else "end"
                chart.text(x - 4, y - 12, f"this run {percent}", "own-label", anchor)
        least = f"{format_percent(overheads[-1])} at {format_bytes(self.minimum_bytes)}"
        return chart.picture(f"Overhead against budget: from nothing at {format_bytes(max(whole, 1))} to {least}")

    def _rows(self) -> list[tuple[str, ...]]:
        return [_HEADER, *map(self.cells, self.points)]

    def limits(self) -> str:
        """A sentence on the least budget."""
        least, bound = format_bytes(self.minimum_bytes), format_bytes(self.lower_bound_bytes)
        if self.minimum_bytes <= self.lower_bound_bytes:
            return f"{least} is the least budget of all: no schedule peaks lower"
        below = f"; no schedule peaks below {bound}" if self.lower_bound_bytes else ""
        return f"least budget met by {self.planner}: {least}{below}"

    def cells(self, point: CurvePoint) -> tuple[str, ...]:
        """A row of the table: budget, share of the peak, overhead, lower bound."""
        least = self.least_overhead(point)
        share = format_percent(point.budget_bytes / max(self.unconstrained_peak_bytes, 1))
        bound = "-" if least is None else format_percent(least)
        return format_bytes(point.budget_bytes), share, format_percent(self.overhead(point.time_ns)), bound


def make_curve(
    graph: Graph,
    costs: Costs,
    *,
    points: int = CURVE_POINTS,
    planner: str = CURVE_PLANNER,
    seed: int = 0,
    known: Iterable[CurvePoint] = (),
    budgets: Sequence[int] = (),
    on_progress: Progress | None = None,
) -> Curve:
    """Plan at ``points`` budgets from the unconstrained peak to the least that ``planner`` meets, denser near the
    least.

    ``known``: results of other plans of the graph; their budgets become points too. ``budgets``: use these bytes
    instead of ``points``; those that ``planner`` does not meet are left out.
    """
    if not (isinstance(points, int) and 2 <= points <= _MOST_POINTS):
        raise PlanError(f"a curve has from 2 to {_MOST_POINTS} points, not {points!r}: each is a plan of its own.")
    whole = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    base = plain_time_ns(graph, costs)
    needed = [graph.ops[op] for op in needed_ops(graph)]
    beside = sum(int(costs.time_ns[op.id]) for op in needed if op.collective and costs.collectives_beside)
    every_schedule_ns = max(sum(int(costs.time_ns[op.id]) for op in needed) - beside, beside)
    found = [CurvePoint(whole, whole, base, every_schedule_ns), *known]
    if on_progress is not None:
        on_progress("finding the least budget", 0.0)
    result = simulate(graph, costs, lowest_schedule(graph, costs, planner, seed))
    lowest = CurvePoint(result.peak_bytes, result.peak_bytes, result.time_ns)
    if lowest.budget_bytes < whole:
        found.append(lowest)
    # Steps get smaller near the least budget, where overhead rises most.
    shares = [(1 - step / (points - 1)) ** 1.5 for step in range(1, points)]
    budgets = budgets or [lowest.budget_bytes + int((whole - lowest.budget_bytes) * share) for share in shares]
    for done, budget in enumerate(dict.fromkeys(budgets)):
        if on_progress is not None:
            on_progress("planning at several budgets", done / len(budgets))
        solution = solve(Problem(graph, costs, budget, seed), planner)
        if solution.schedule is not None:
            found.append(CurvePoint(budget, solution.peak_bytes, solution.time_ns, solution.lower_bound_ns))
    return Curve(whole, base, peak_lower_bound(graph, costs), planner, _monotone(found))


def lowest_schedule(
    graph: Graph, costs: Costs, planner: str, seed: int = 0, on_progress: Progress | None = None
) -> Schedule:
    """The schedule with the lowest peak that ``planner`` finds: the one it names if asked for an impossible budget."""
    solution = solve(Problem(graph, costs, 1, seed, on_progress), planner)
    return solution.schedule or solution.lowest_schedule or minimum_peak(graph, costs, seed)[1]


def _monotone(found: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """One point per budget, largest first. Each is as quick as those of smaller budgets, and its bound is as high as
    those of larger ones."""
    points = []
    for budget in sorted({point.budget_bytes for point in found}, reverse=True):
        within = [point for point in found if point.budget_bytes <= budget]
        bounds = [p.lower_bound_ns for p in found if p.budget_bytes >= budget and p.lower_bound_ns is not None]
        quickest = min(within, key=lambda point: (point.time_ns, point.peak_bytes))
        points.append(CurvePoint(budget, quickest.peak_bytes, quickest.time_ns, max(bounds, default=None)))
    return tuple(points)

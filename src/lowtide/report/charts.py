"""The pictures of a report: memory over the step, overhead against budget, predicted beside measured."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from lowtide.memory.measurement import Measurement
from lowtide.report.curve import Curve, CurvePoint
from lowtide.report.report import Report
from lowtide.report.slices import Slices, measured_levels, slices_of
from lowtide.report.svg import Frame, axes, picture, round_ticks, staircase, tag, text, ticks
from lowtide.units import BYTE_UNITS, TIME_UNITS, format_bytes, format_percent

SLICES = 600
_HEADROOM = 1.08


@dataclass(frozen=True, slots=True)
class Size:
    """``ticks``: how many labels fit (across, up)."""

    width: int
    height: int
    ticks: tuple[int, int]
    class_: str


WIDE = Size(960, 360, (8, 5), "wide")
NARROW = Size(390, 300, (4, 4), "narrow")


def memory_chart(report: Report, size: Size, style: str = "") -> str:
    """Bytes against time, within the budget and without, with the budget, the passes, and where something is recomputed."""
    end_ns = max(report.run.time_ns, report.plain.time_ns, 1)
    within, without = slices_of(report.run, end_ns, SLICES), slices_of(report.plain, end_ns, SLICES)
    top = max(*within.levels, *without.levels, report.budget_bytes if _visible(report) else 0, 1)
    frame = Frame(size.width, size.height, end_ns, top * _HEADROOM, bottom=58)
    parts = [
        *axes(frame, ticks(end_ns, size.ticks[0], TIME_UNITS), ticks(top, size.ticks[1], BYTE_UNITS)),
        *_passes(frame, report),
        tag("path", d=staircase(frame, without.levels, SLICES), class_="plain"),
        tag("path", d=staircase(frame, within.levels, SLICES, closed=True), class_="area"),
        tag("path", d=staircase(frame, within.levels, SLICES), class_="plan"),
        *_budget_line(frame, report, size),
        *_recomputed(frame, within),
        tag("line", y1=frame.top, y2=frame.floor, x1=-9, x2=-9, class_="cursor"),
    ]
    title = (
        f"Memory over the step: {format_bytes(report.run.peak_bytes)} at most within the budget of "
        f"{format_bytes(report.budget_bytes)}, {format_bytes(report.plain.peak_bytes)} without"
    )
    return picture(frame, parts, title, f"chart {size.class_}", style)


def memory_picture(report: Report) -> str:
    """The memory chart as a file of its own."""
    return memory_chart(report, WIDE, read_template("charts.css")) + "\n"


def read_template(name: str) -> str:
    """The text of a file in ``templates``."""
    return resources.files("lowtide.report").joinpath("templates", name).read_text(encoding="utf-8")


def _visible(report: Report) -> bool:
    """A budget far above everything would only flatten the lines."""
    return report.budget_bytes <= 1.5 * max(report.plain.peak_bytes, report.run.peak_bytes)


def _passes(frame: Frame, report: Report) -> list[str]:
    """Where the backward pass begins, within the budget."""
    if not 0 < report.run.boundary_ns < report.run.time_ns:
        return []
    at = frame.x(report.run.boundary_ns)
    return [
        tag("line", x1=at, x2=at, y1=frame.top - 12, y2=frame.floor, class_="boundary"),
        text(at - 6, frame.top - 8, "forward", "tick", "end"),
        text(at + 6, frame.top - 8, "backward", "tick"),
    ]


def _budget_line(frame: Frame, report: Report, size: Size) -> list[str]:
    if not _visible(report):
        return []
    at = frame.y(report.budget_bytes)
    words = f"budget {format_bytes(report.budget_bytes)}"
    return [
        tag("line", x1=frame.left, x2=frame.width - frame.right, y1=at, y2=at, class_="budget"),
        text(frame.left + 6, at - 6, words, "budget-label"),
    ]


def _recomputed(frame: Frame, within: Slices) -> list[str]:
    """A strip below the time axis."""
    top = frame.floor + 32
    width = frame.width - frame.left - frame.right
    parts = [tag("rect", x=frame.left, y=top, width=width, height=10, class_="strip", rx=2)]
    for first, last in within.again:
        start, end = (frame.x(frame.largest_x * at / SLICES) for at in (first, last + 1))
        parts.append(tag("rect", x=start, y=top, width=round(max(end - start, 1), 1), height=10, class_="again"))
    return parts


def curve_chart(curve: Curve, budget_bytes: int, size: Size) -> str:
    """Overhead in percent against the budget, which shrinks to the right; the bound below; what no schedule reaches, shaded."""
    top = max((100 * curve.overhead(point.time_ns) for point in curve.points), default=0.0)
    frame = Frame(
        size.width, size.height, curve.unconstrained_peak_bytes, max(top, 1) * _HEADROOM, reversed_x=True, right=24
    )
    whole = max(curve.unconstrained_peak_bytes, 1)
    across = [(whole * share, f"{100 * share:.0f} %") for share in (1, 0.8, 0.6, 0.4, 0.2, 0)]
    up = [(percent, f"{percent:g} %") for percent in round_ticks(max(top, 1), size.ticks[1])]
    bounds = [(p.budget_bytes, p.lower_bound_ns) for p in curve.points if p.lower_bound_ns is not None]
    line = [(frame.x(p.budget_bytes), _height(frame, curve, p.time_ns)) for p in curve.points]
    below = [(frame.x(budget), _height(frame, curve, ns)) for budget, ns in bounds]
    parts = [
        *_out_of_reach(frame, curve),
        *axes(frame, across, up),
        tag("polygon", points=_points([*line, *below[::-1]]), class_="gap") if below else "",
        tag("polyline", points=_points(below), class_="bound") if below else "",
        tag("polyline", points=_points(line), class_="plan"),
        *(_dot(frame, curve, point, size, own=point.budget_bytes == budget_bytes) for point in curve.points),
        text(frame.width - frame.right, frame.height - 6, "budget, % of the unconstrained peak", "tick", "end"),
    ]
    least = curve.points[-1]
    title = (
        f"Overhead against budget: from nothing at {format_bytes(whole)} to {format_percent(curve.overhead(least.time_ns))} "
        f"at {format_bytes(least.budget_bytes)}"
    )
    return picture(frame, parts, title, f"chart {size.class_}")


def _height(frame: Frame, curve: Curve, time_ns: int) -> float:
    return frame.y(max(100 * curve.overhead(time_ns), 0.0))


def _points(pairs: list[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in pairs)


def _dot(frame: Frame, curve: Curve, point: CurvePoint, size: Size, *, own: bool) -> str:
    at_x, at_y = frame.x(point.budget_bytes), _height(frame, curve, point.time_ns)
    percent = format_percent(curve.overhead(point.time_ns))
    words = f"{format_bytes(point.budget_bytes)}: {percent}"
    dot = tag("circle", tag("title", words), cx=at_x, cy=at_y, r=6 if own else 4, class_="own" if own else "dot")
    if not own:
        return dot
    near = at_x < size.width * 0.35
    return dot + text(at_x - 4, at_y - 12, f"this run {percent}", "own-label", "start" if near else "end")


def _out_of_reach(frame: Frame, curve: Curve) -> list[str]:
    if curve.lower_bound_bytes <= 0:
        return []
    start, end = frame.x(min(curve.lower_bound_bytes, curve.unconstrained_peak_bytes)), frame.x(0)
    height = frame.floor - frame.top
    return [tag("rect", x=start, y=frame.top, width=round(end - start, 1), height=height, class_="unreachable")]


def measured_chart(report: Report, measured: Measurement, size: Size) -> str:
    """Predicted and measured bytes, each against the share of its own time; empty where there is no measured timeline."""
    levels = measured_levels(measured, SLICES)
    if not levels:
        return ""
    predicted = slices_of(report.run, max(report.run.time_ns, 1), SLICES).levels
    top = max(*predicted, *levels, 1)
    frame = Frame(size.width, size.height, 100, top * _HEADROOM, right=24)
    across = [(share, f"{share} %") for share in (0, 20, 40, 60, 80, 100)]
    parts = [
        *axes(frame, across, ticks(top, size.ticks[1], BYTE_UNITS)),
        tag("path", d=staircase(frame, predicted, SLICES, closed=True), class_="area"),
        tag("path", d=staircase(frame, predicted, SLICES), class_="plan"),
        tag("path", d=staircase(frame, levels, SLICES), class_="measured"),
        text(frame.width - frame.right, frame.height - 6, "share of the step's time", "tick", "end"),
    ]
    title = f"Predicted peak {format_bytes(report.run.peak_bytes)}, measured {format_bytes(measured.peak_bytes)}"
    return picture(frame, parts, title, f"chart {size.class_}")

"""The charts of a report over time: memory during the step, predicted and measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from lowtide.memory.measurement import Measurement
from lowtide.report.profile import StepProfile
from lowtide.report.report import Report
from lowtide.report.svg import SIZES, Chart, Size, read_template, ticks
from lowtide.units import BYTE_UNITS, TIME_UNITS, format_bytes

SLICES = 600  # equal slices of time; a chart shows the highest level in each


def highest(intervals: Iterable[tuple[int, int, int]], end_ns: int) -> list[tuple[int, int]]:
    """For each slice of ``end_ns``, the highest level of ``intervals`` (start, end, level) and the index of the first
    interval that has it. Slices after the last interval are left out."""
    found = [(-1, 0)] * SLICES
    for index, (start, end, level) in enumerate(intervals):
        first = min(start * SLICES // end_ns, SLICES - 1)
        last = min(-(-end * SLICES // end_ns), SLICES)  # a slice that it only touches does not count
        for position in range(first, max(last, first + 1)):
            if level > found[position][0]:
                found[position] = level, index
    return [each for each in found if each[0] >= 0]


def slices_of(run: StepProfile, end_ns: int) -> list[tuple[int, int]]:
    """For each slice, the most bytes in use and the index of the span at which they are."""
    levels = run.levels()
    return highest(((s.start_ns, s.end_ns, level) for s, level in zip(run.spans, levels, strict=True)), end_ns)


def _levels(run: StepProfile, end_ns: int) -> list[int]:
    return [level for level, _ in slices_of(run, end_ns)]


def memory_picture(report: Report) -> str:
    """The memory chart as a separate file."""
    return memory_chart(report, SIZES[0], read_template("palette.css") + read_template("charts.css")) + "\n"


def memory_chart(report: Report, size: Size, style: str = "") -> str:
    """Bytes against time, within the budget and without. Shows the budget, the two passes, and recomputations."""
    run, plain, budget, end_ns = report.run, report.plain, report.budget_bytes, report.end_ns
    within, without = _levels(run, end_ns), _levels(plain, end_ns)
    shown = budget <= 1.5 * max(plain.peak_bytes, run.peak_bytes)  # a line far above would flatten the others
    top = max(*within, *without, budget if shown else 0, 1)
    chart = Chart(size, end_ns, top)
    chart.axes(ticks(end_ns, size.across, TIME_UNITS), ticks(top, size.up, BYTE_UNITS))
    if 0 < run.boundary_ns < run.time_ns:
        chart.boundary(run.boundary_ns)
    chart.staircase(without, SLICES, "plain")
    chart.staircase(within, SLICES, "area", closed=True)
    chart.staircase(within, SLICES, "plan")
    if shown:
        y = chart.level(budget, "budget")
        chart.text(chart.left + 6, y - 6, f"budget {format_bytes(budget)}", "budget-label")
    _draw_recomputation(chart, run, end_ns)
    chart.draw("line", y1=chart.top, y2=chart.floor, x1=-9, x2=-9, class_="cursor")
    return chart.picture(
        f"Memory over the step: {format_bytes(run.peak_bytes)} at most within the budget of {format_bytes(budget)}, "
        f"{format_bytes(plain.peak_bytes)} without",
        style,
    )


def _draw_recomputation(chart: Chart, run: StepProfile, end_ns: int) -> None:
    """Draw a strip below the time axis."""
    y = chart.floor + 32
    chart.draw("rect", x=chart.left, y=y, width=chart.right - chart.left, height=10, class_="strip", rx=2)
    repeats = ((span.start_ns, span.end_ns, int(span.again and span.time_ns > 0)) for span in run.spans)
    last = 0
    for again, group in itertools.groupby(level for level, _ in highest(repeats, end_ns)):
        first, last = last, last + len(list(group))
        if again:
            start, end = (chart.x(end_ns * at / SLICES) for at in (first, last))
            chart.draw("rect", x=start, y=y, width=round(max(end - start, 1), 1), height=10, class_="again")


def measured_chart(run: StepProfile, measured: Measurement, size: Size) -> str:
    """Predicted and measured bytes, each against the share of its own time; empty if there is no measured timeline."""
    if not measured.timeline:
        return ""
    changes = [(0, 0), *measured.timeline, (measured.time_ns, 0)]
    held = ((start, end, max(level, 0)) for (start, level), (end, _) in itertools.pairwise(changes))
    levels = [level for level, _ in highest(held, max(measured.time_ns, 1))]
    predicted = _levels(run, max(run.time_ns, 1))
    top = max(*predicted, *levels, 1)
    chart = Chart(size, 100, top)
    across = [(share, f"{share} %") for share in (0, 20, 40, 60, 80, 100)]
    chart.axes(across, ticks(top, size.up, BYTE_UNITS), "share of the step's time")
    chart.staircase(predicted, SLICES, "area", closed=True)
    chart.staircase(predicted, SLICES, "plan")
    chart.staircase(levels, SLICES, "measured")
    return chart.picture(f"Predicted peak {format_bytes(run.peak_bytes)}, measured {format_bytes(measured.peak_bytes)}")

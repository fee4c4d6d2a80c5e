"""The memory map as a picture, and as data for the page's script."""

from __future__ import annotations

import itertools
from html import escape
from typing import Any

from lowtide.errors import PlanError
from lowtide.report.memory_map import Content, MemoryMap, Rectangle, shown_contents
from lowtide.report.profile import Span, StepProfile
from lowtide.report.report import Report
from lowtide.report.svg import Chart, Size, read_template, ticks
from lowtide.units import BYTE_UNITS, TIME_UNITS, format_bytes, format_source, format_time

MAP_SIZES = (Size(960, 520, 8, 6, "wide"), Size(390, 400, 4, 5, "narrow"))
_TITLE = 24  # height of the title of a separate picture


def map_picture(report: Report) -> str:
    """The map as a separate file. Raises ``PlanError`` if there are no addresses."""
    if report.memory_map is None:
        raise PlanError("a recorded run has no addresses to draw; a memory map (.map.svg) is made of a saved plan.")
    style = read_template("palette.css") + read_template("charts.css")
    return map_chart(report, report.memory_map(), MAP_SIZES[0], style, alone=True) + "\n"


def map_chart(report: Report, found: MemoryMap, size: Size, style: str = "", *, alone: bool = False) -> str:
    """Address against time, with a rectangle for each allocation, the budget and the passes. ``alone``: with a title, a
    legend, and a tooltip for each rectangle."""
    run, budget = report.run, report.budget_bytes
    shown = budget <= 1.5 * found.reserved_bytes  # a line far above would flatten the map
    top = max(found.reserved_bytes, budget if shown else 0, 1)
    chart = Chart(size, max(run.time_ns, 1), top, top=28 + _TITLE if alone else 28)
    chart.axes(ticks(chart.largest_x, size.across, TIME_UNITS), ticks(top, size.up, BYTE_UNITS))
    for content in Content:
        _draw(chart, run, [each for each in found.rectangles if each.content is content], content, alone)
    if 0 < run.boundary_ns < run.time_ns:
        chart.boundary(run.boundary_ns)
    if found.block_bytes < found.reserved_bytes:
        chart.level(found.block_bytes, "arena")
    if shown:
        chart.level(budget, "budget")
    if alone:
        chart.text(chart.left, 18, map_title(report, found), "title")
        _draw_legend(chart, shown_contents(run))
    chart.draw("rect", x=-9, y=-9, width=0, height=0, class_="picked")
    return chart.picture(f"Memory map: {map_title(report, found)}", style)


def map_title(report: Report, found: MemoryMap) -> str:
    """The reserved bytes, those of them in use at the peak, and the budget."""
    reserved, peak, budget = map(format_bytes, (found.reserved_bytes, report.run.peak_bytes, report.budget_bytes))
    return f"{reserved} reserved, {peak} live at the peak, budget {budget}"


def map_data(report: Report, found: MemoryMap) -> dict[str, Any]:
    """What the script shows of each rectangle: start and end in ns, address, bytes, content."""
    names: dict[str, int] = {}
    rectangles = []
    for each in sorted(found.rectangles, key=lambda one: (one.first, one.offset)):
        start, end = _times(report.run, each)
        rectangles.append([start, end, each.offset, each.block.bytes, names.setdefault(_what(each), len(names))])
    return {"end_ns": max(report.run.time_ns, 1), "rectangles": rectangles, "names": list(names)}


def describe(span: Span) -> str:
    """``addmm in blocks.0.attention (model.py:12), again``."""
    where = f" in {span.module}" if span.module else ""
    source = f" ({format_source(span.source)})" if span.source else ""
    return span.name + where + source + (", again" if span.again else "")


def _draw(chart: Chart, run: StepProfile, rectangles: list[Rectangle], content: Content, alone: bool) -> None:
    """Draw all rectangles of one content: as one path, or one by one, each with its tooltip."""
    path, parts = "", list[str]()
    for each in rectangles:
        start, end = _times(run, each)
        x, y = chart.x(start), chart.y(each.end)
        width, height = round(chart.x(end) - x, 1), round(chart.y(each.offset) - y, 1)
        path += f"M{x} {y}h{width}v{height}h{-width}z"
        if alone:
            bounds = f"{format_bytes(each.block.bytes)} at {each.offset}, {format_time(start)} to {format_time(end)}"
            title = f"<title>{escape(f'{_what(each)}: {bounds}')}</title>"
            parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}">{title}</rect>')
    if alone:
        chart.draw("g", "".join(parts), class_=content.name.lower())
    elif path:
        chart.draw("path", d=path, class_=content.name.lower())


def _draw_legend(chart: Chart, shown: list[Content]) -> None:
    """A square and a word for each content ``shown``, below the time axis."""
    widths = itertools.accumulate((28 + 6.6 * len(content.value) for content in shown), initial=0)
    for content, x in zip(shown, widths, strict=False):
        chart.draw(
            "rect", x=round(chart.left + x, 1), y=chart.floor + 36, width=10, height=10, class_=content.name.lower()
        )
        chart.text(chart.left + x + 14, chart.floor + 45, content.value, "tick")


def _times(run: StepProfile, each: Rectangle) -> tuple[int, int]:
    """Start and end in ns."""
    end = run.spans[each.last].end_ns if each.last < len(run.spans) else run.time_ns
    return (run.spans[each.first].start_ns if each.first < len(run.spans) else run.time_ns), end


def _what(each: Rectangle) -> str:
    block = each.block
    if block.span is None:
        return f"{block.kind.value}, {block.detail}"
    kind = "" if each.content is not Content.OTHER else f", {block.kind.value}"
    return ", ".join(filter(None, (describe(block.span) + kind, block.detail, each.content.value if not kind else "")))

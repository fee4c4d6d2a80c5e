"""The picture of a curve: overhead in percent against the budget, which shrinks to the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.report.svg import Chart, Size, ticks
from lowtide.units import format_bytes, format_percent


class Priced(NamedTuple):
    """A budget, the overhead within it and what no schedule within it undercuts, as fractions of the time without one."""

    budget_bytes: int
    overhead: float
    bound: float | None


def overhead_chart(
    points: Sequence[Priced], whole_bytes: int, unreachable_bytes: int, size: Size, own_bytes: int = 0
) -> str:
    """A line through ``points``, the bound below it, and what no schedule reaches, shaded. ``own_bytes``: the point to mark."""
    top = max(1, *(100 * point.overhead for point in points))
    chart = Chart(size, whole_bytes, top, reversed_x=True)
    whole = max(whole_bytes, 1)

    def place(budget: int, overhead: float) -> tuple[float, float]:
        return chart.x(budget), chart.y(max(100 * overhead, 0.0))

    if unreachable_bytes > 0:
        start = chart.x(min(unreachable_bytes, whole))
        width, height = round(chart.x(0) - start, 1), chart.floor - chart.top
        chart.draw("rect", x=start, y=chart.top, width=width, height=height, class_="unreachable")
    across = [(whole * share / 100, f"{share} %") for share in (100, 80, 60, 40, 20, 0)]
    chart.axes(across, ticks(top, size.up, {"%": 1}), "budget, % of the unconstrained peak")
    line = [place(point.budget_bytes, point.overhead) for point in points]
    bound = [place(point.budget_bytes, point.bound) for point in points if point.bound is not None]
    shapes = [("polygon", [*line, *bound[::-1]], "gap"), ("polyline", bound, "bound")] if bound else []
    for name, corners, class_ in [*shapes, ("polyline", line, "plan")]:
        chart.draw(name, points=" ".join(f"{x},{y}" for x, y in corners), class_=class_)
    for point, (x, y) in zip(points, line, strict=True):
        own, percent = point.budget_bytes == own_bytes, format_percent(point.overhead)
        words = f"<title>{format_bytes(point.budget_bytes)}: {percent}</title>"
        chart.draw("circle", words, cx=x, cy=y, r=6 if own else 4, class_="own" if own else "dot")
        if own:
            chart.text(x - 4, y - 12, f"this run {percent}", "own-label", "start" if x < size.width * 0.35 else "end")
    least = points[-1]
    return chart.picture(
        f"Overhead against budget: from nothing at {format_bytes(whole)} to {format_percent(least.overhead)} "
        f"at {format_bytes(least.budget_bytes)}"
    )

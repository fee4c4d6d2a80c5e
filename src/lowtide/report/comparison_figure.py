"""Overhead against budget, a line per planner, as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.extras import require
from lowtide.report.comparison import Cell, Instance

_MARKERS = "osD^v<>pPX*hd8H1234x+"
_COLOURS = 10  # of matplotlib's default cycle; markers repeat later, so that every pair is used once


def comparison_figure(instance: Instance, cells: Sequence[Cell]) -> Any:
    """A ``matplotlib.figure.Figure``: overhead in percent (logarithmic above 1) against budget in percent of the peak.

    Budgets that a planner does not meet are left out; the dashed line is the best proven lower bound of all planners.
    """
    own = [cell for cell in cells if cell.instance == instance.name]
    figure = require("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, planner in enumerate(dict.fromkeys(cell.planner for cell in own)):
        points = _points(instance, [c for c in own if c.planner == planner], "overhead_percent")
        auto = planner.startswith("auto")
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            color=f"C{index % _COLOURS}",
            marker=_MARKERS[index % len(_MARKERS)],
            linewidth=2 if auto else 1,
            markersize=7 if auto else 5,
            alpha=1.0 if auto else 0.8,
            zorder=3 if auto else 2,
            label=planner if points else f"{planner} (none met)",
        )
    bounds = dict(_points(instance, own, "lower_bound_percent"))  # the last of each budget is its largest
    if bounds:
        axes.plot([*bounds], [*bounds.values()], color="black", linestyle="--", linewidth=1, label="lower bound")
    axes.set_yscale("symlog", linthresh=1)
    percent = require("matplotlib.ticker").FormatStrFormatter("%g")
    axes.yaxis.set_major_formatter(percent)
    axes.set(title=f"{instance.name} ({instance.ops} ops)", ylim=(0, None))
    axes.set(xlabel="budget (% of the peak without recomputation)", ylabel="overhead (%)")
    axes.set_xticks(sorted({round(_share(instance, cell), 1) for cell in own}))
    axes.xaxis.set_major_formatter(percent)
    axes.invert_xaxis()
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _points(instance: Instance, cells: Sequence[Cell], figure: str) -> list[tuple[float, float]]:
    """(budget in percent of the peak, percent) of the cells that have the figure, by budget."""
    pairs = [(_share(instance, cell), getattr(cell, figure)) for cell in cells]
    return sorted((share, percent) for share, percent in pairs if percent is not None)


def _share(instance: Instance, cell: Cell) -> float:
    return 100 * cell.budget_bytes / max(instance.peak_bytes, 1)

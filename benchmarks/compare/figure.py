"""Time against peak, one plot per model and one curve per mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.mechanisms import MECHANISMS
from benchmarks.compare.worker import Row
from lowtide.extras import require

_MARKERS = "osD^v<>pPX*hd8H1"
_HIGHEST = 1.75  # time that is shown: slower points stand at the upper edge, with their number


def save_figures(rows: Sequence[Row], folder: Path) -> None:
    """``FOLDER/MODEL.png`` for every model."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model and not row.message]
        if own:
            compared_figure(model, own).savefig(folder / f"{model}.png", dpi=110)


def compared_figure(model: str, rows: Sequence[Row]) -> Any:
    """A ``matplotlib.figure.Figure``; compiled mechanisms are dashed, lowtide is thick. Points beyond the scale stand at its
    edge."""
    figure = require("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, mechanism) in enumerate(MECHANISMS.items()):
        points = sorted((row.peak_ratio, row.time_ratio) for row in rows if row.mechanism == name)
        if points:
            color = f"C{index % 10}"
            axes.plot(
                *zip(*((peak, min(time, _HIGHEST)) for peak, time in points), strict=True),
                color=color,
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle="--" if mechanism.compiled else "-",
                linewidth=2.5 if name in ("lowtide", "lowtide-inductor") else 1,
                label=name,
            )
            for peak, time in points:
                if time > _HIGHEST:
                    axes.annotate(
                        f"{time:.1f}", (peak, _HIGHEST), (0, 5), textcoords="offset points", color=color, ha="center"
                    )
    axes.set(title=model, xlabel="peak, of plain eager's", ylabel="time per step, of plain eager's")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure

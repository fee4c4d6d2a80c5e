"""Time against peak, one plot per model and one curve per mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.mechanisms import MECHANISMS
from benchmarks.compare.worker import Row
from lowtide.extras import require

_MARKERS = "osD^v<>pPX*hd8H1"


def save_figures(rows: Sequence[Row], folder: Path) -> None:
    """``FOLDER/MODEL.png`` for every model."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model and not row.message]
        if own:
            compared_figure(model, own).savefig(folder / f"{model}.png", dpi=110)


def compared_figure(model: str, rows: Sequence[Row]) -> Any:
    """A ``matplotlib.figure.Figure``; compiled mechanisms are dashed, lowtide is thick."""
    figure = require("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, mechanism) in enumerate(MECHANISMS.items()):
        points = sorted((row.peak_ratio, row.time_ratio) for row in rows if row.mechanism == name)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=f"C{index % 10}",
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle="--" if mechanism.compiled else "-",
                linewidth=2.5 if name in ("lowtide", "lowtide-inductor") else 1,
                label=name,
            )
    axes.set(title=model, xlabel="peak, of plain eager's", ylabel="time per step, of plain eager's")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure

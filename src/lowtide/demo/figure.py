"""Memory over one training step, plain and planned, as a matplotlib figure."""

from __future__ import annotations

from typing import Any

from lowtide.extras import require
from lowtide.memory.measurement import Measurement
from lowtide.planning import Plan

_MEBIBYTE = 2**20
_COLOURS = ("#888888", "#1f6fb2")


def memory_figure(measurements: dict[str, Measurement], plan: Plan) -> Any:
    """A ``matplotlib.figure.Figure``: bytes above the start of the step against the fraction of the step's time."""
    require("matplotlib")
    figure_class = require("matplotlib.figure").Figure
    figure = figure_class(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (name, measurement), colour in zip(measurements.items(), _COLOURS, strict=True):
        times = [at / measurement.time_ns for at, _ in measurement.timeline]
        levels = [level / _MEBIBYTE for _, level in measurement.timeline]
        peak = measurement.peak_bytes / _MEBIBYTE
        axes.step(times, levels, where="post", color=colour, linewidth=1, label=f"{name}: peak {peak:.1f} MiB")
    axes.axhline(plan.budget_bytes / _MEBIBYTE, color="#c0392b", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="forward and backward pass (share of its time)", ylabel="memory above the start (MiB)")
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure

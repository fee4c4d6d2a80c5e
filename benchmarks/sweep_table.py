"""The sweep's rows as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.sweep_model import Row

_MEBIBYTE = 2**20
_HEADER = (
    "model",
    "ops",
    "budget",
    "MiB allowed",
    "predicted",
    "measured",
    "overhead predicted",
    "measured",
    "planning s",
    "gradients",
)


def table(rows: Sequence[Row], broken: Mapping[int, Sequence[str]], setting: str) -> str:
    """A heading, a summary and the table; ``broken`` maps ``id(row)`` to what the row breaks."""
    good = sum(not broken[id(row)] for row in rows)
    ran = [row for row in rows if row.status == "ok"]
    equal = sum(row.equal for row in ran)
    summary = (
        f"{len({row.model for row in rows})} models, {len(rows)} rows, {good} without complaint; {equal} of {len(ran)} runs "
        "equal plain eager to the bit in every loss, gradient, parameter, buffer and generator state of every iteration."
    )
    lines = [
        "# Model sweep",
        "",
        f"`python -m benchmarks.sweep`: {setting}.",
        "",
        summary,
        "Peaks are above the level at the start of the step; overheads are over the same program without recomputation.",
        "",
        _line(_HEADER),
        _line(["---", *["---:"] * 8, "---"]),
    ]
    lines += [_line(_cells(row, broken[id(row)])) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row, broken: Sequence[str]) -> list[str]:
    if row.status == "capture":
        return [row.model, "", row.asked, "", "", "", "", "", "", "not captured"]
    if row.status == "infeasible":
        minimum = f"infeasible, minimum {_mebibytes(row.minimum_bytes)} MiB"
        return [row.model, "", row.asked, _mebibytes(row.budget_bytes), "", "", "", "", "", minimum]
    equality = "equal" if row.equal else f"within {row.difference:.1g}, equal to the program without recomputation"
    return [
        row.model,
        str(row.ops),
        row.asked,
        _mebibytes(row.budget_bytes),
        _mebibytes(row.predicted_peak_bytes),
        _mebibytes(row.measured_peak_bytes),
        _percent(row.overhead_predicted),
        _percent(row.overhead_measured),
        f"{row.planning_seconds:.1f}",
        "; ".join(broken) if broken else equality,
    ]


def _mebibytes(count: int) -> str:
    return f"{count / _MEBIBYTE:.2f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"

"""The comparison as Markdown: a table per model, and every point at which lowtide is beaten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from benchmarks.compare.mechanisms import MECHANISMS, RIVALS
from benchmarks.compare.models import COMPARED
from benchmarks.compare.worker import Row
from benchmarks.outcomes import CLOSE

_NOISE = 0.05  # of time ratios: a lead smaller than this is none
_KINKS = 5  # gradients may be so many times further from eager's than eager's own rounding takes them


def document(rows: Sequence[Row], setting: Mapping[str, object]) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in setting.items())
    lines = [
        "# Comparison",
        "",
        f"Made by `python -m benchmarks.compare`; {facts} (load: of the machine, average of a minute, at the end).",
        "Peak and time are ratios to plain eager in the same process; predicted time and its proven lower bound are ratios to",
        "the same operators without recomputation. See `docs/performance.md` for the method.",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        lines += ["", *_table(model, [row for row in rows if row.model == model])]
    lines += ["", "## Lost cells", "", *_lost_lines(rows)]
    return "\n".join(lines) + "\n"


def _table(model: str, rows: Sequence[Row]) -> Iterator[str]:
    measured = [row for row in rows if not row.message]
    plain = f": plain eager peaks at {measured[0].plain_peak_bytes / 2**20:.1f} MiB" if measured else ""
    yield f"## {model}{plain}"
    yield ""
    reserving = any(row.reserved_bytes for row in rows)  # on a GPU: what the allocator took from the device
    figures = ["peak", *["reserved"] * reserving, "time", "predicted peak", "predicted time", "bound", "prepared in"]
    yield f"| mechanism | setting | {' | '.join(figures)} | gradients |"
    yield f"|---|---|{'---:|' * len(figures)}---|"
    for row in sorted(rows, key=lambda row: (list(MECHANISMS).index(row.mechanism), -row.peak_bytes)):
        yield _line(row, _most_error(rows), reserving)
    rounding = max((row.rounding for row in rows), default=0.0)
    if rounding:
        yield ""
        finer = {torch.float64: "double", torch.float32: "single"}[COMPARED[model].finer]
        yield f"Plain eager's own gradients are within {rounding:.0e} of those in {finer} precision."


def _most_error(rows: Sequence[Row]) -> float:
    """Of gradients that only rounding explains; ``rows`` are of one model."""
    return max(CLOSE, _KINKS * max((row.rounding for row in rows), default=0.0))


def _line(row: Row, most_error: float, reserving: bool) -> str:
    setting = row.setting if not row.setting.isdigit() else f"{int(row.setting) / 2**20:.1f} MiB"
    if row.message:
        return f"| {row.mechanism} | {setting} | {row.message.replace('|', '/')} |{' |' * reserving} | | | | | |"
    predicted = row.predicted_peak_bytes / row.plain_peak_bytes
    reserved = [f"{row.reserved_bytes / row.plain_peak_bytes:.3f}"] if reserving else []
    cells = [row.mechanism, setting, f"{row.peak_ratio:.3f}", *reserved, f"{row.time_ratio:.2f}"]
    planned = [f"{predicted:.3f}", f"{1 + row.predicted_overhead:.3f}"]
    planned.append(f"{1 + row.lower_bound:.3f}" if row.lower_bound else "")
    cells += planned if row.predicted_peak_bytes else ["", "", ""]
    return f"| {' | '.join([*cells, f'{row.prepare_seconds:.1f} s', _gradients(row, most_error)])} |"


def _gradients(row: Row, most_error: float) -> str:
    if row.gradient_error == 0:
        return "equal to the bit"
    return f"{'within ' if row.gradient_error <= most_error else 'WRONG: '}{row.gradient_error:.0e}"


def lost(rows: Sequence[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Points of other mechanisms that no point of lowtide of their kind matches, with lowtide's quickest at that peak.

    A point is matched where lowtide's peak is no higher and its time no more than the noise above. Points with wrong
    gradients, and plain eager's own, which all times are ratios to, do not count.
    """
    for row in rows:
        if row.mechanism not in RIVALS or row.message:
            continue
        if row.gradient_error > _most_error([other for other in rows if other.model == row.model]):
            continue
        ours = "lowtide-inductor" if MECHANISMS[row.mechanism].compiled else "lowtide"
        candidates = [r for r in rows if (r.model, r.mechanism) == (row.model, ours) and not r.message]
        if not candidates:
            continue
        within = [r for r in candidates if r.peak_bytes <= row.peak_bytes]
        best = min(within, key=lambda r: r.time_ratio, default=None)
        if best is None or best.time_ratio > row.time_ratio + _NOISE:
            yield row, best


def _lost_lines(rows: Sequence[Row]) -> Iterator[str]:
    found = list(lost(rows))
    yield f"A cell is lost where lowtide of the same kind has no point with at most its peak and at most {_NOISE} more time."
    yield ""
    if not found:
        yield "None."
        return
    yield "| model | mechanism | setting | its peak | its time | lowtide's peak | lowtide's time |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for row, best in found:
        ours = [f"{best.peak_ratio:.3f}", f"{best.time_ratio:.2f}"] if best else ["none as low", ""]
        cells = [row.model, row.mechanism, row.setting, f"{row.peak_ratio:.3f}", f"{row.time_ratio:.2f}", *ours]
        yield f"| {' | '.join(cells)} |"

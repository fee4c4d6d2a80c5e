"""A report as one HTML file that needs nothing else: light and dark, wide and narrow, by pointer and by keyboard."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lowtide.extras import require
from lowtide.ir import Kind
from lowtide.memory.measurement import Measurement
from lowtide.report.charts import NARROW, SLICES, WIDE, curve_chart, measured_chart, memory_chart, read_template
from lowtide.report.curve import Curve
from lowtide.report.modules import ModuleRow, block_of
from lowtide.report.profile import MemoryBlock, StepProfile
from lowtide.report.report import Report
from lowtide.report.slices import slices_of
from lowtide.units import format_bytes, format_percent, format_source, format_time
from lowtide.version import __version__

_MOST_BLOCKS = 12
_MOST_GROUPS = 9
_MOST_ROWS = 60


def html_page(report: Report) -> str:
    """The page. Needs ``jinja2``."""
    jinja2 = require("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_template), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page: str = environment.get_template("report.html").render(_context(report))
    return page


def _context(report: Report) -> dict[str, Any]:
    alive = _alive(report.run.at_peak)
    rows = [row for row in report.rows if row.saved_bytes or row.recomputed_ops or report.unit == "module"]
    sections = [("memory", "Memory"), ("peak", "Peak"), ("modules", report.unit.capitalize() + "s")]
    sections += [("curve", "What memory costs")] if report.curve else []
    sections += [("measured", "Measured")] if report.measured else []
    return {
        "title": report.title,
        "budget": format_bytes(report.budget_bytes),
        "lead": _lead(report),
        "sections": [*sections, ("facts", "Facts")],
        "tiles": _tiles(report),
        "memory_charts": [memory_chart(report, size) for size in (WIDE, NARROW)],
        "step": _step(report),
        "peak_sentence": _peak_sentence(report.run),
        "groups": _groups(report),
        "alive": alive,
        "alive_left": format_bytes(sum(row["size"] for row in alive[_MOST_BLOCKS:])),
        "detailed": any(row["detail"] for row in alive),
        "most": _MOST_BLOCKS,
        "unit": report.unit,
        "rows": _rows(rows[:_MOST_ROWS]),
        "rows_left": len(report.rows) - len(rows[:_MOST_ROWS]),
        "curve": _curve(report.curve, report.budget_bytes) if report.curve else None,
        "measured": _measured(report, report.measured) if report.measured else None,
        "facts": _facts(report),
        "css": read_template("charts.css") + read_template("report.css"),
        "script": read_template("report.js"),
        "version": __version__,
    }


def _lead(report: Report) -> str:
    device = report.device or "costs as given"
    if report.unit == "operator":
        return f"A recorded run, replayed within a budget by {report.decided_by}; times of {device}."
    return f"Predicted memory and time of one training step, scheduled by {report.decided_by}; times of {device}."


def _tiles(report: Report) -> list[dict[str, str]]:
    run, plain = report.run, report.plain
    again = [span for span in run.spans if span.again and span.time_ns]
    bound = "no lower bound is known"
    if report.lower_bound_ns is not None and plain.time_ns:
        bound = f"no schedule does it below {format_percent(report.lower_bound_ns / plain.time_ns - 1)}"
    whole = max(plain.peak_bytes, 1)
    again_time = f"{format_time(run.time_ns - plain.time_ns)} on {format_time(plain.time_ns)}"
    rows = [
        ("Peak memory", format_bytes(run.peak_bytes), f"of {format_bytes(plain.peak_bytes)} without a budget"),
        ("Share of the peak", format_percent(run.peak_bytes / whole), f"budget {format_bytes(report.budget_bytes)}"),
        ("Extra time", format_percent(report.overhead), bound),
        ("Recomputed", f"{len(again)} ops", again_time),
    ]
    return [{"name": name, "figure": figure, "aside": aside} for name, figure, aside in rows]


def _step(report: Report) -> dict[str, Any]:
    """What the script shows at each position."""
    end_ns = max(report.run.time_ns, report.plain.time_ns, 1)
    within, without = (slices_of(run, end_ns, SLICES) for run in (report.run, report.plain))
    names: dict[str, int] = {}
    running = [names.setdefault(_running(report.run, index), len(names)) for index in within.spans]
    return {
        "slices": SLICES,
        "end_ns": end_ns,
        "peak": max(range(len(within.levels)), key=lambda index: within.levels[index], default=0),
        "within": within.levels,
        "without": without.levels,
        "running": running,
        "names": list(names),
    }


def _running(run: StepProfile, index: int) -> str:
    span = run.spans[index]
    where = f" in {span.module}" if span.module else ""
    source = f" ({format_source(span.source)})" if span.source else ""
    return span.name + where + source + (", again" if span.again else "")


def _peak_sentence(run: StepProfile) -> str:
    if not run.spans:
        return "Nothing runs."
    return f"{format_bytes(run.peak_bytes)} in {len(run.at_peak)} blocks while {_running(run, run.peak_index)} runs."


def _alive(blocks: list[MemoryBlock]) -> list[dict[str, Any]]:
    most = max((block.bytes for block in blocks), default=1)
    return [_block(block, most) for block in blocks]


def _block(block: MemoryBlock, most: int) -> dict[str, Any]:
    span = block.span
    about = {
        "size": block.bytes,
        "bytes": format_bytes(block.bytes),
        "percent": round(100 * block.bytes / most, 1),
        "detail": block.detail,
    }
    if span is None:
        return about | {"name": block.kind.value, "module": "", "source": "", "note": ""}
    notes = [block.kind.value] * (block.kind is not Kind.TENSOR) + ["recomputed"] * span.again
    source = format_source(span.source)
    return about | {"name": span.name, "module": span.module, "source": source, "note": ", ".join(notes)}


def _groups(report: Report) -> list[dict[str, Any]]:
    """The peak by block of the model (or by operator), in the order of the program; the small ones together."""
    sums: Counter[str] = Counter()
    for block in report.run.at_peak:
        sums[_group_of(block, report.unit)] += block.bytes
    named = {name for name, _ in sums.most_common(_MOST_GROUPS)}
    order = dict.fromkeys(block_of(span.module) for span in report.run.spans)
    ranks = {name: rank for rank, name in enumerate(order)}
    large = sorted((name for name in sums if name in named), key=lambda name: ranks.get(name, len(ranks)))
    groups = [_group(name, sums[name]) for name in large]
    other = sum(size for name, size in sums.items() if name not in named)
    return [*groups, _group("other", other) | {"other": True}] if other else groups


def _group_of(block: MemoryBlock, unit: str) -> str:
    if block.span is None:
        return "(before the step)"
    return block_of(block.span.module) or (block.span.target if unit == "operator" else "(model)")


def _group(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "bytes": format_bytes(size), "weight": max(size, 1), "other": False}


def _rows(rows: list[ModuleRow]) -> list[dict[str, Any]]:
    saved = max((row.saved_bytes for row in rows), default=0) or 1
    again = max((row.recomputed_ns for row in rows), default=0) or 1
    return [
        {
            "cells": row.cells(),
            "saved_percent": round(100 * row.saved_bytes / saved, 1),
            "again_percent": round(100 * row.recomputed_ns / again, 1),
        }
        for row in rows
    ]


def _curve(curve: Curve, budget_bytes: int) -> dict[str, Any]:
    return {
        "sentence": curve.limits()[:1].upper() + curve.limits()[1:] + ".",
        "bounded": any(point.lower_bound_ns is not None for point in curve.points),
        "unreachable": curve.lower_bound_bytes > 0,
        "charts": [curve_chart(curve, budget_bytes, size) for size in (WIDE, NARROW)],
        "rows": [curve.cells(point) for point in curve.points],
    }


def _measured(report: Report, measured: Measurement) -> dict[str, Any]:
    rows = [
        ("peak", report.run.peak_bytes, measured.peak_bytes, format_bytes),
        ("time", report.run.time_ns, measured.time_ns, format_time),
    ]
    return {
        "device": measured.device,
        "charts": list(filter(None, (measured_chart(report, measured, size) for size in (WIDE, NARROW)))),
        "rows": [(name, show(a), show(b), f"{100 * (b / max(a, 1) - 1):+.1f} %") for name, a, b, show in rows],
    }


def _facts(report: Report) -> list[tuple[str, str]]:
    run, plain = report.run, report.plain
    return [
        ("budget", f"{report.budget_bytes} bytes"),
        ("predicted peak", f"{run.peak_bytes} bytes"),
        ("peak without a budget", f"{plain.peak_bytes} bytes"),
        ("predicted time", f"{format_time(run.time_ns)}, without a budget {format_time(plain.time_ns)}"),
        ("operators", f"{len(plain.spans)}, of which {plain.boundary} in the forward pass"),
        ("scheduled by", report.decided_by),
        ("costs of", report.device or "as given"),
    ]

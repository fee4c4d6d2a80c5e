"""A report as one self-contained HTML file: for light and dark themes, wide and narrow screens, pointer and keyboard.
There is also a smaller card of a plan for notebooks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lowtide.extras import require
from lowtide.notebook import card, facts_table, folded, note, picture, table
from lowtide.report.charts import SLICES, measured_chart, memory_chart, slices_of
from lowtide.report.map_chart import MAP_SIZES, describe, map_chart, map_data, map_title
from lowtide.report.memory_map import shown_contents
from lowtide.report.modules import block_of
from lowtide.report.profile import Span
from lowtide.report.report import Report
from lowtide.report.svg import SIZES, read_template
from lowtide.report.text import module_rows, summary_facts
from lowtide.units import format_bytes, format_percent, format_source, format_time
from lowtide.version import __version__

_MOST_GROUPS = 9
_MOST_ROWS = 60
_CAPTION = (
    "Filled: memory within the budget, which is the dashed line. Grey: memory without a budget. In the strip below, operators "
    "run again where it is coloured."
)


def report_card(report: Report) -> str:
    """Self-contained HTML for a notebook: the summary, memory over the step, and the modules."""
    rows, left = module_rows(report)
    modules = table(rows) + (note(left) if left else "")
    drawn = picture(memory_chart(report, SIZES[0]), read_template("charts.css"), _CAPTION)
    return card(report.heading, facts_table(summary_facts(report)), drawn, folded(f"by {report.unit}", modules))


def html_page(report: Report) -> str:
    """The page, written by the template from the report and its charts. Needs ``jinja2``."""
    jinja2 = require("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_template), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "bytes": format_bytes,
        "time": format_time,
        "percent": format_percent,
        "source": format_source,
        "running": describe,
    }
    run, curve, measured = report.run, report.curve, report.measured
    found = report.found_map()
    native, expandable = report.cuda() if report.cuda else (None, None)
    rows = [row for row in report.rows if report.unit == "module" or row.saved_bytes or row.recomputed_ops]
    page: str = environment.get_template("report.html").render(
        report=report,
        run=run,
        plain=report.plain,
        alive=run.at_peak,
        groups=_groups(report),
        rows=rows[:_MOST_ROWS],
        step=_step(report),
        memory_charts=[memory_chart(report, size) for size in SIZES],
        curve_charts=[curve.chart(size, report.budget_bytes) for size in SIZES] if curve else [],
        map=found,
        map_title=map_title(report, found) if found else "",
        map_data=map_data(report, found) if found else None,
        map_charts=[map_chart(report, found, size) for size in MAP_SIZES] if found else [],
        contents=[(content.value, content.name.lower()) for content in shown_contents(report.run)],
        native=native,
        expandable=expandable,
        measured_charts=[measured_chart(run, measured, size) for size in SIZES] if measured else [],
        version=__version__,
    )
    return page


def _step(report: Report) -> dict[str, Any]:
    """What the script shows at each position."""
    within, without = (slices_of(run, report.end_ns) for run in (report.run, report.plain))
    levels = [level for level, _ in within]
    names: dict[str, int] = {}
    return {
        "slices": SLICES,
        "end_ns": report.end_ns,
        "peak": levels.index(max(levels)) if levels else 0,
        "within": levels,
        "without": [level for level, _ in without],
        "running": [names.setdefault(describe(report.run.spans[index]), len(names)) for _, index in within],
        "names": list(names),
    }


def _groups(report: Report) -> list[tuple[str, int]]:
    """The peak by block of the model (or by operator), in program order. Small groups are merged at the end."""

    def group(span: Span | None) -> str:
        if span is None:
            return "(before the step)"
        return block_of(span.module) or (span.target if report.unit == "operator" else "(model)")

    sums: Counter[str] = Counter()
    for block in report.run.at_peak:
        sums[group(block.span)] += block.bytes
    order = [None, *report.run.spans]
    large = dict(sums.most_common(_MOST_GROUPS))
    groups = [(name, large[name]) for name in dict.fromkeys(map(group, order)) if name in large]
    other = sums.total() - sum(large.values())
    return [*groups, ("other", other)] if other else groups

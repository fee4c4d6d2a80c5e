"""A report as what a notebook shows of a plan: its summary, memory over the step, and the modules."""

from __future__ import annotations

from lowtide.notebook import card, facts_table, folded, note, picture, table
from lowtide.report.charts import memory_chart
from lowtide.report.report import Report
from lowtide.report.svg import SIZES, read_template
from lowtide.report.text import module_rows, summary_facts

_CAPTION = (
    "Filled: memory within the budget, which is the dashed line. Grey: memory without a budget. In the strip below, operators "
    "run again where it is coloured."
)


def report_card(report: Report) -> str:
    """HTML that needs nothing else; of a plan, or of a recorded run."""
    rows, left = module_rows(report)
    modules = table(rows) + (note(left) if left else "")
    drawn = picture(memory_chart(report, SIZES[0]), read_template("charts.css"), _CAPTION)
    return card(report.heading, facts_table(summary_facts(report)), drawn, folded(f"by {report.unit}", modules))

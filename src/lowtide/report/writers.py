"""Write a report to a file, in the form that its extension names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lowtide.errors import PlanError
from lowtide.report.charts import memory_picture
from lowtide.report.chrome import chrome_trace
from lowtide.report.html import html_page
from lowtide.report.map_chart import map_picture
from lowtide.report.report import Report
from lowtide.report.snapshot import memory_snapshot
from lowtide.report.text import report_text
from lowtide.store import write_atomically

# By extension; the first match counts.
WRITERS: dict[str, Callable[[Report], str | bytes]] = {
    ".html": html_page,
    ".trace.json": chrome_trace,
    ".pickle": memory_snapshot,
    ".map.svg": map_picture,
    ".svg": memory_picture,
    ".txt": report_text,
}


def writer_of(path: str | Path) -> Callable[[Report], str | bytes]:
    """The writer for ``path``. Raises ``PlanError`` with the known extensions."""
    found = next((write for extension, write in WRITERS.items() if str(path).endswith(extension)), None)
    if found is None:
        raise PlanError(f"no report is written as {path}; its name must end in {', '.join(WRITERS)}.")
    return found


def write_report(report: Report, path: str | Path) -> None:
    """Write ``report`` in the form that the extension of ``path`` names."""
    write_atomically(Path(path), writer_of(path)(report))

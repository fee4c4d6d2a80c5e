"""From a saved artefact to a file, the writer chosen by the file's extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lowtide.errors import PlanError
from lowtide.report.report import Report
from lowtide.store import write_atomically


def _html(report: Report) -> str:
    from lowtide.report.html import html_page

    return html_page(report)


def _chrome(report: Report) -> str:
    from lowtide.report.chrome import chrome_trace

    return chrome_trace(report)


def _snapshot(report: Report) -> bytes:
    from lowtide.report.snapshot import memory_snapshot

    return memory_snapshot(report)


def _svg(report: Report) -> str:
    from lowtide.report.charts import WIDE, memory_chart
    from lowtide.report.html import chart_style

    return memory_chart(report, WIDE, chart_style()) + "\n"


def _text(report: Report) -> str:
    return report.text


# Extension, what it writes, and how. The first that fits counts.
WRITERS: dict[str, tuple[str, Callable[[Report], str | bytes]]] = {
    ".html": ("one self-contained page", _html),
    ".trace.json": ("Chrome Trace Events, for ui.perfetto.dev", _chrome),
    ".pickle": ("a snapshot for pytorch.org/memory_viz", _snapshot),
    ".svg": ("memory over the step", _svg),
    ".txt": ("plain text", _text),
}


def check_extension(path: str | Path) -> None:
    """Raises ``PlanError`` naming the extensions there are."""
    if not any(str(path).endswith(extension) for extension in WRITERS):
        raise PlanError(f"no report is written as {path}; its name must end in {', '.join(WRITERS)}.")


def write_report(report: Report, path: str | Path) -> None:
    """Write ``report`` in the form that the extension of ``path`` names."""
    check_extension(path)
    write = next(write for extension, (_, write) in WRITERS.items() if str(path).endswith(extension))
    write_atomically(Path(path), write(report))

"""The Markdown page of the planner benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowtide.report.comparison import Cell, Instance
from lowtide.units import format_bytes, format_time

_HEAD = """# Planners

`python -m benchmarks.planners`: every planner on every graph of `benchmarks/graphs`, and on published instances where they
are present, at budgets in percent of the peak without recomputation. A cell is the overhead in % over the program
without recomputation, and in brackets the seconds of CPU time of the planner, all threads and processes; the least
overhead of a column is bold, a star marks a proven optimum. The last row is the best lower bound that any planner
proved. `unsolved` means that the planner found nothing, `infeasible` that it proved that there is nothing.
"""


def document(
    instances: Iterable[Instance], cells: Sequence[Cell], broken: Sequence[str], environment: Mapping[str, Any]
) -> str:
    """The page: how it was made, the claims, a table and a plot per graph."""
    lines = [_HEAD, *(f"- {key}: {value}" for key, value in environment.items()), "", "## Claims", ""]
    lines += [f"- BROKEN: {line}" for line in broken] or ["All hold in the cells below."]
    for instance in instances:
        own = [cell for cell in cells if cell.instance == instance.name]
        if own:
            lines += ["", *_section(instance, own)]
    return "\n".join(lines) + "\n"


def _section(instance: Instance, cells: list[Cell]) -> list[str]:
    budgets = sorted({cell.budget for cell in cells}, key=lambda text: -float(text.rstrip("%")))
    planners = sorted({cell.planner for cell in cells}, key=lambda name: (not name.startswith("auto"), name))
    by_place = {(cell.planner, cell.budget): cell for cell in cells}
    size = f"{instance.ops} ops, {format_time(instance.time_ns)}, peak {format_bytes(instance.peak_bytes)}"
    lines = [f"## {instance.name}", "", f"{size}.", "", f"| planner | {' | '.join(budgets)} |"]
    lines.append("|---|" + "---:|" * len(budgets))
    least = {b: min((c.time_ns for c in cells if c.budget == b and c.time_ns is not None), default=-1) for b in budgets}
    for planner in planners:
        texts = [_text(by_place.get((planner, budget)), least[budget]) for budget in budgets]
        lines.append(f"| {planner} | {' | '.join(texts)} |")
    lines.append(f"| *lower bound* | {' | '.join(_bound(cells, budget) for budget in budgets)} |")
    return [*lines, "", f"![overhead against budget](planners/{instance.name}.svg)"]


def _text(cell: Cell | None, least_ns: int) -> str:
    if cell is None:
        return ""
    taken = cell.cpu_seconds if cell.cpu_seconds is not None else cell.seconds
    seconds = "" if taken is None else f" ({taken:.1f})"
    if cell.overhead_percent is None:
        return cell.status + seconds
    percent = f"{cell.overhead_percent:.3f}{'*' if cell.status == 'optimal' else ''}"
    return (f"**{percent}**" if cell.time_ns == least_ns else percent) + seconds


def _bound(cells: list[Cell], budget: str) -> str:
    known = [c.lower_bound_percent for c in cells if c.budget == budget and c.lower_bound_percent is not None]
    return f"{max(known):.3f}" if known else ""

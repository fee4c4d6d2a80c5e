"""What the planner benchmark must show, checked over its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lowtide.report.comparison import FAILED, Cell

AUTO = "auto"
# Most CPU seconds of a planner on a graph, in every cell.
CPU_LIMITS = {("gpt2_24", AUTO): 10.0, ("gpt2_48", AUTO): 30.0, ("gpt2_24", "h-rockmate"): 60.0}


def violations(cells: Sequence[Cell]) -> list[str]:
    """A line per claim that a cell breaks; cells that were not run break nothing."""
    found: list[str] = []
    for group in _grouped(cells, lambda cell: (cell.instance, cell.budget)):
        found += _in_one_column(group)
    for group in _grouped(cells, lambda cell: (cell.instance, cell.planner)):
        if group[0].planner == AUTO:
            found += _monotone(group)
    for cell in cells:
        found += _of_one_cell(cell)
    return found


def _grouped(cells: Iterable[Cell], key: Callable[[Cell], object]) -> Iterator[list[Cell]]:
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    yield from groups.values()


def _in_one_column(cells: list[Cell]) -> Iterator[str]:
    """Of all planners at one budget of one graph."""
    solved = [cell for cell in cells if cell.time_ns is not None]
    quickest = min(solved, key=lambda cell: cell.time_ns or 0, default=None)
    if quickest is None:
        return
    for cell in cells:
        where = _where(cell)
        if cell.planner == AUTO and cell.time_ns is None:
            yield f"{where}: {cell.status}, but {quickest.planner} is feasible"
        elif cell.planner == AUTO and (cell.time_ns or 0) > (quickest.time_ns or 0):
            ours, best = cell.overhead_percent or 0.0, quickest.overhead_percent or 0.0
            yield f"{where}: overhead {ours:.3f} %, but {quickest.planner} has {best:.3f} %"
        if cell.status == "infeasible":
            yield f"{where}: claims to have proven infeasibility, but {quickest.planner} is feasible"
        best = quickest.overhead_percent or 0.0
        if cell.lower_bound_percent is not None and cell.lower_bound_percent > best + 1e-9:
            yield f"{where}: lower bound {cell.lower_bound_percent:.3f} % above {quickest.planner}'s {best:.3f} %"


def _monotone(cells: list[Cell]) -> Iterator[str]:
    """More budget is never slower, nor less feasible."""
    ordered = sorted(cells, key=lambda cell: cell.budget_bytes)
    for small, large in zip(ordered, ordered[1:], strict=False):
        if small.time_ns is not None and large.time_ns is None:
            yield f"{_where(large)}: {large.status}, but feasible at {small.budget}"
        elif small.time_ns is not None and (large.time_ns or 0) > small.time_ns:
            yield f"{_where(large)}: slower than at {small.budget}"


def _of_one_cell(cell: Cell) -> Iterator[str]:
    if cell.status == FAILED:
        yield f"{_where(cell)}: failed: {cell.message}"
    if cell.peak_bytes is not None and cell.peak_bytes > cell.budget_bytes:
        yield f"{_where(cell)}: peak {cell.peak_bytes} above the budget {cell.budget_bytes}"
    limit = CPU_LIMITS.get((cell.instance, cell.planner))
    if limit is not None and (cell.cpu_seconds or 0.0) > limit:
        yield f"{_where(cell)}: {cell.cpu_seconds:.1f} s of CPU, more than {limit:g}"


def _where(cell: Cell) -> str:
    return f"{cell.instance} at {cell.budget}, {cell.planner}"

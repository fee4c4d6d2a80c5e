"""Cells as text and as a figure; what the planner benchmark reports as broken."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.planner_claims import violations
from benchmarks.planner_table import document
from benchmarks.planners import Results
from lowtide.report.comparison import Cell, Instance, Task, cell_text, comparison_figure

INSTANCE = Instance("net", 10, 1000, 100)


def cell(planner: str, percent: int, overhead: float | None, **fields: object) -> Cell:
    status = "unsolved" if overhead is None else "feasible"
    time_ns = None if overhead is None else round(100 + overhead)
    made = Cell("net", planner, f"{percent}%", 10 * percent, status, 10 * percent, time_ns, overhead, seconds=1.25)
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


GOOD = [
    cell("auto", 70, 1.0, lower_bound_percent=0.5),
    cell("greedy", 70, 2.0),
    cell("auto", 50, 5.0),
    cell("greedy", 50, None, peak_bytes=None),
]


def test_cell_texts() -> None:
    assert [cell_text(c) for c in GOOD] == ["1.000 (0.500) 1.2 s", "2.000 1.2 s", "5.000 1.2 s", "unsolved 1.2 s"]
    assert cell_text(cell("auto", 70, 3.0, status="optimal", seconds=None)) == "3.000*"


def test_nothing_is_broken() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (cell("greedy", 50, 4.0), "auto: overhead 5.000 %, but greedy has 4.000 %"),
        (cell("auto", 70, 6.0), "auto: slower than at 50%"),
        (cell("auto", 70, None, peak_bytes=None), "auto: unsolved, but greedy is feasible"),
        (cell("greedy", 70, None, status="infeasible", peak_bytes=None), "claims to have proven infeasibility"),
        (cell("greedy", 70, 2.0, lower_bound_percent=1.5), "lower bound 1.500 % above auto's 1.000 %"),
        (cell("greedy", 70, None, status="failed", message="boom", peak_bytes=None), "failed: boom"),
        (cell("greedy", 70, 2.0, peak_bytes=701), "peak 701 above the budget 700"),
    ],
)
def test_broken_claims(changed: Cell, complaint: str) -> None:
    cells = [changed if (c.planner, c.budget) == (changed.planner, changed.budget) else c for c in GOOD]
    assert any(complaint in line for line in violations(cells))


def test_page_has_auto_first_and_the_best_bold() -> None:
    page = document([INSTANCE], list(reversed(GOOD)), ["something"], {"processor": "any"})
    assert "- BROKEN: something" in page
    assert page.index("| auto | **1.000** (1.2) | **5.000** (1.2) |") < page.index("| greedy | 2.000 (1.2) | unsolved")
    assert "| *lower bound* | 0.500 |  |" in page


def test_results_take_over_what_was_asked_and_no_other_budget(tmp_path: Path) -> None:
    theirs, ours = Results(tmp_path / "theirs", {}), Results(tmp_path / "ours", {})
    theirs.instances = ours.instances = {"net": INSTANCE}
    for each in GOOD:
        theirs.add(each)
    asked = [
        Task("net", "auto", "70%", 700),
        Task("net", "auto", "50%", 501),
        Task("net", "dtr", "50%", 500),
    ]
    ours.take(tmp_path / "theirs", asked)
    assert list(ours.cells.values()) == [GOOD[0]]
    assert not ours.lacks(asked[0], 1.0)
    assert ours.lacks(asked[1], 1.0)


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = comparison_figure(INSTANCE, GOOD).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"auto", "greedy", "lower bound"}
    assert list(lines["auto"].get_xdata()) == [50, 70]
    assert list(lines["auto"].get_ydata()) == [5.0, 1.0]
    assert list(lines["greedy"].get_xdata()) == [70]
    assert lines["auto"].get_marker() != lines["greedy"].get_marker()

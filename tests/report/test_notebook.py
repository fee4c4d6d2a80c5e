"""What notebooks show: HTML that is whole by itself, with the numbers of the object, and nothing of a name taken for HTML."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from lowtide import Measurement, measure
from lowtide.batches import MaxBatch
from lowtide.dynamic.statistics import OnlineStatistics
from lowtide.extras import EXTRAS
from lowtide.notebook import bar
from lowtide.place import Buffers, place, solve_placed
from lowtide.planning import Plan
from lowtide.report.text import module_rows
from lowtide.solve import Problem, solve
from lowtide.trace import simulate
from lowtide.units import format_bytes, format_percent, format_time
from tests.report.reports import HOSTILE, MEASURED, small_plan, trace_of_chain

_VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))
_FETCHING = frozenset(("script", "link", "img", "iframe", "object", "embed", "base", "use", "image"))


class _Card(HTMLParser):
    """``rows``: the cells of every table row. ``words``: text outside of styles. Fails where tags do not close in turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words = ""
        self.tags: list[str] = []
        self.open: list[str] = []
        self.styles = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick", "onload", "data"}
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.styles += data
            return
        self.words += data
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def facts(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self.rows if len(row) == 2}


def _shown(thing: object) -> _Card:
    return _Card(thing._repr_html_())  # type: ignore[attr-defined]


def _results(name: str = "chain") -> dict[str, object]:
    plan = small_plan(name)
    assert plan.known_curve is not None
    counted = OnlineStatistics(6000, 5000, 40, 1_000_000, 7, 7000, 50_000, 3, 200_000, 1)
    buffers = Buffers(np.array([0, 1]), np.array([2, 3]), np.array([64, 128]), 1)
    return {
        "plan": plan,
        "curve": plan.known_curve,
        "measurement": MEASURED,
        "batch": MaxBatch(96, 32, 1 << 30, True, plan, None, False),
        "statistics": counted,
        "replay": simulate(trace_of_chain(), 6000),
        "solution": solve(Problem(plan.graph, plan.costs, plan.budget_bytes), "greedy"),
        "placement": place(buffers),
        "layout": plan.layout,
        "placed": solve_placed(Problem(plan.graph, plan.costs, plan.budget_bytes), "greedy"),
    }


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    return _results()


KINDS = ["plan", "curve", "measurement", "batch", "statistics", "replay", "solution", "placement", "layout", "placed"]


@pytest.mark.parametrize("kind", KINDS)
def test_cards_are_whole_and_fetch_nothing(results: dict[str, object], kind: str) -> None:
    html = results[kind]._repr_html_()  # type: ignore[attr-defined]
    shown = _Card(html)
    assert not _FETCHING & set(shown.tags)
    assert set(re.findall(r"\w+://[^\"]*", html)) <= {"http://www.w3.org/2000/svg"}  # a name, nothing that is fetched
    assert "url(" not in shown.styles and "@import" not in shown.styles
    assert len(shown.rows) >= 3
    assert shown.tags.count("svg") == (kind in ("plan", "curve"))


@pytest.mark.parametrize("kind", KINDS)
def test_styles_stay_inside_the_card(results: dict[str, object], kind: str) -> None:
    styles = _shown(results[kind]).styles
    heads = [re.sub(r"\([^)]*\)", "", head) for head in re.findall(r"([^{}]+)\{", styles)]
    selectors = [name.strip() for head in heads for name in head.split(",")]
    assert len(selectors) > 10
    assert [name for name in selectors if not name.startswith((".lowtide", "svg.chart"))] == []
    assert set(re.findall(r"var\((--\w+)\)", styles)) <= set(re.findall(r"(--\w+):", styles))


def test_a_plan_says_what_its_text_says(results: dict[str, object]) -> None:
    plan = results["plan"]
    assert isinstance(plan, Plan)
    shown, text = _shown(plan), str(plan)
    whole = plan.unconstrained_peak_bytes
    assert (
        shown.facts["predicted peak"] == f"{format_bytes(plan.peak_bytes)} ({format_percent(plan.peak_bytes / whole)})"
    )
    assert shown.facts["overhead"] == f"{format_percent(plan.overhead)} of {format_time(plan.costs.total_time_ns)}"
    in_text = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", text, re.MULTILINE))
    assert shown.facts == in_text
    modules = [row for row in shown.rows if len(row) == 5]
    assert modules == [list(row) for row in module_rows(plan.as_report())[0]]
    assert len(modules) == 3
    assert text.partition("\n")[0] in shown.words


def test_a_curve_shows_its_points(results: dict[str, object]) -> None:
    curve = small_plan().curve(points=4)
    shown = _shown(curve)
    assert shown.rows[1:] == [list(curve.cells(point)) for point in curve.points]
    assert curve.limits() in shown.words
    assert shown.tags.count("circle") == len(curve.points)


def test_a_measurement_is_short_everywhere() -> None:
    found = measure(lambda: torch.ones(1 << 20))
    shown = _shown(found)
    assert shown.facts["peak"] == format_bytes(found.peak_bytes) == "4.0 MiB"
    assert shown.facts["time"] == format_time(found.time_ns)
    assert all(f"{name} {value}" in str(found) for name, value in shown.facts.items())
    many = dataclasses.replace(found, timeline=tuple((i, i) for i in range(100_000)))
    assert len(str(many)) < 200 and len(repr(many)) < 300 and len(many._repr_html_()) < 5000
    assert "reserved" not in _shown(Measurement(1, 1, "cuda:0", (), 0)).facts


def test_other_results_show_their_figures(results: dict[str, object]) -> None:
    facts = {kind: _shown(results[kind]).facts for kind in KINDS}
    assert facts["batch"]["largest batch"] == "96" and facts["batch"]["  without"] == "32"
    assert facts["statistics"]["overhead"] == "25.0 %" and facts["statistics"]["peak"] == "4.9 KiB"
    assert "25.0 %" in str(results["statistics"])
    layout = results["layout"]
    placed = results["placed"]
    assert facts["placed"]["block"] == format_bytes(placed.layout.block_bytes)  # type: ignore[attr-defined]
    assert facts["placed"]["peak"] == format_bytes(placed.solution.peak_bytes)  # type: ignore[attr-defined]
    assert facts["layout"]["block"] == format_bytes(layout.block_bytes)  # type: ignore[attr-defined]
    replay, solution, placement = results["replay"], results["solution"], results["placement"]
    assert facts["replay"]["rematerializations"] == str(replay.rematerializations)  # type: ignore[attr-defined]
    assert facts["solution"]["peak"] == format_bytes(solution.peak_bytes)  # type: ignore[attr-defined]
    assert facts["placement"]["reserved"] == format_bytes(placement.reserved_bytes) == "192 B"  # type: ignore[attr-defined]


def test_names_are_text() -> None:
    plan = small_plan(HOSTILE)
    graph = dataclasses.replace(plan.graph, ops=tuple(dataclasses.replace(op, module=HOSTILE) for op in plan.graph.ops))
    shown = _shown(dataclasses.replace(plan, graph=graph))
    assert "script" not in shown.tags
    assert HOSTILE in shown.words and any(row[0] == HOSTILE for row in shown.rows if len(row) == 5)
    assert HOSTILE in _Card(bar(HOSTILE, 0.5)).words


def test_lists_of_plans_are_readable(results: dict[str, object]) -> None:
    plan = results["plan"]
    assert isinstance(plan, Plan)
    assert len(repr([plan])) < 150
    assert format_bytes(plan.peak_bytes) in repr(plan)


def test_without_the_extras() -> None:
    blocked = [*EXTRAS, "IPython"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); "
        "from tests.report.reports import small_plan; plan = small_plan(); "
        "assert plan._repr_html_() and plan.known_curve._repr_html_()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Every form of a report, of a plan and of a trace: well formed, and true to the simulator."""

from __future__ import annotations

import json
import pickle
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import LowtideError, PlanError
from lowtide.ir import keep_all_schedule, simulate
from lowtide.memory.measurement import Measurement, load_measurement
from lowtide.planning import Plan, make_plan
from lowtide.report.profile import profile_of_schedule
from lowtide.report.report import Report, report_of_trace
from lowtide.report.writers import WRITERS, write_report
from tests.report.reports import HOSTILE, MEASURED, plan_report, small_plan, trace_of_chain, trace_report
from tests.solve.small_graphs import sharded
from tests.support.random_graphs import random_graph

_VOID = {"meta", "link"}
REPORTS = {"plan": plan_report, "trace": trace_report}


@pytest.fixture(params=REPORTS)
def report(request: pytest.FixtureRequest) -> Report:
    return REPORTS[request.param]()


def _written(report: Report, path: Path) -> str:
    write_report(report, path)
    return path.read_text(encoding="utf-8")


class _Balance(HTMLParser):
    """Every element is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.addresses += [value for key, value in attrs if key in ("href", "src") and value]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page(report: Report, tmp_path: Path) -> None:
    page = _written(report, tmp_path / "report.html")
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    anchors = {address for address in parser.addresses if address.startswith("#")}
    assert anchors <= {f"#{name}" for name in parser.ids}
    assert [address for address in parser.addresses if address not in anchors] == ["data:,"]
    assert not re.search(r"url\(|@import|fetch\(|https?://(?!www\.w3\.org/)", page)
    for span in report.run.spans:
        assert not span.source or span.module in page
    found = re.search(r'id="step">(.*?)</script>', page)
    assert found is not None
    data = json.loads(found[1])
    assert max(data["within"]) == report.run.peak_bytes
    assert max(data["without"]) == report.plain.peak_bytes
    assert len(data["running"]) == len(data["within"])


def test_page_says_what_was_measured(tmp_path: Path) -> None:
    page = _written(plan_report(), tmp_path / "report.html")
    assert "Predicted and measured" in page
    assert "2.9 KiB" in page
    assert "Predicted and measured" not in _written(trace_report(), tmp_path / "trace.html")


@pytest.mark.parametrize("seed", range(6))
def test_every_form_of_any_graph(seed: int, tmp_path: Path) -> None:
    """Tiny ones, with views, workspaces, effects and random operators; the smallest has a single operator."""
    graph, costs = random_graph(seed, 1 + 7 * seed, forward_backward=seed > 0)
    plan = make_plan(graph, costs, budget="100%")
    lowest = make_plan(graph, costs, budget=max(plan.curve(points=2).minimum_bytes, 1), planner="auto{effort=1}")
    for extension in WRITERS:
        path = tmp_path / f"plan{extension}"
        lowest.report(path)
        assert path.stat().st_size > 0
    assert _alive(pickle.loads((tmp_path / "plan.pickle").read_bytes()))[0] == run_peak(lowest)


def run_peak(plan: Plan) -> int:
    return profile_of_schedule(plan.graph, plan.costs, plan.schedule).peak_bytes


def test_page_of_a_hostile_name(tmp_path: Path) -> None:
    page = _written(plan_report(HOSTILE), tmp_path / "report.html")
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page


def test_chrome_trace(report: Report, tmp_path: Path) -> None:
    data = json.loads(_written(report, tmp_path / "report.trace.json"))
    events = [event for event in data["traceEvents"] if event["ph"] != "M"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    for pid, run in ((1, report.run), (2, report.plain)):
        tracks = [event["tid"] for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert tracks.count(3) == sum(span.again for span in run.spans)
        assert tracks.count(1) + tracks.count(2) + tracks.count(3) == len(run.spans)
        levels = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "memory" and e["pid"] == pid]
        assert max(levels) == run.peak_bytes
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert names[1, 3] == "recomputation"


def _alive(snapshot: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """The most bytes that its events hold, and what is left; blocks never overlap, and are freed as they were made."""
    (events,) = snapshot["device_traces"]
    held: dict[int, int] = {}
    most = 0
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(other + held[other] <= address or address + size <= other for other in held)
            held[address] = size
            most = max(most, sum(held.values()))
        elif event["action"] == "free_completed":
            assert held.pop(address) == size
    return most, held


def test_snapshot(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.pickle"
    write_report(report, path)
    snapshot = pickle.loads(path.read_bytes())
    most, held = _alive(snapshot)
    assert most == report.run.peak_bytes
    (segment,) = snapshot["segments"]
    blocks = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert blocks == held
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] >= most
    assert segment["allocated_size"] == sum(held.values())


def test_snapshot_names_the_users_lines(tmp_path: Path) -> None:
    path = tmp_path / "report.pickle"
    write_report(plan_report(), path)
    (events,) = pickle.loads(path.read_bytes())["device_traces"]
    frames = next(event["frames"] for event in events if event["action"] == "alloc")
    assert (frames[0]["filename"], frames[0]["line"]) == ("/home/me/model.py", 1)
    assert [frame["name"] for frame in frames[1:]] == ["layers.0.linear", "layers.0", "layers", "forward"]


def test_snapshot_passes_through_memory_viz(report: Report, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz as untyped

    viz: Any = untyped

    path = tmp_path / "report.pickle"
    write_report(report, path)
    snapshot = pickle.loads(path.read_bytes())
    assert "segments: 1" in viz.segsum(snapshot)
    assert "cudaMalloc" in viz.trace(snapshot)
    for plot in (viz.trace_plot, viz.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)
    for flamegraph in (viz.segments, viz.memory):
        lines = flamegraph(snapshot, format_flamegraph=lambda lines: lines).splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == snapshot["segments"][0]["total_size"]


def test_picture(report: Report, tmp_path: Path) -> None:
    root = ElementTree.fromstring(_written(report, tmp_path / "report.svg"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    drawn = {element.get("class") for element in root.iter()}
    assert {"plan", "plain", "area", "budget", "grid"} <= drawn


def test_text(tmp_path: Path) -> None:
    plan = small_plan()
    text = _written(plan_report(), tmp_path / "report.txt")
    assert text.startswith(str(plan).splitlines()[0])
    assert str(plan.known_curve) in text
    assert "at the peak" in text
    assert "predicted, 2.9 KiB measured" in text


def test_plans_report_themselves(tmp_path: Path) -> None:
    plan = small_plan()
    for extension in WRITERS:
        plan.report(tmp_path / f"plan{extension}", MEASURED)
    assert len(list(tmp_path.iterdir())) == len(WRITERS)
    with pytest.raises(PlanError, match=r"\.html, \.trace\.json"):
        plan.report(tmp_path / "plan.pdf")


def test_measurements_are_saved(tmp_path: Path) -> None:
    measurement = Measurement(2000, 10, "cpu", ((0, 1000), (5, 2000)), 500)
    measurement.save(tmp_path / "m.json")
    assert load_measurement(tmp_path / "m.json") == measurement
    for text, reason in (("{}", "not a measurement"), ('{"format": "lowtide-measurement/1"}', "not a complete")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(PlanError, match=reason):
            load_measurement(tmp_path / "bad.json")


def test_a_trace_needs_a_budget_that_is_enough() -> None:
    trace = trace_of_chain()
    with pytest.raises(LowtideError, match="larger --budget"):
        report_of_trace(trace, 1500)
    with pytest.raises(PlanError, match="--budget"):
        report_of_trace(type(trace)(trace.events))


def test_replays_recompute_within_the_recorded_budget() -> None:
    report = trace_report()
    assert report.run.peak_bytes <= report.budget_bytes < report.plain.peak_bytes
    assert any(span.again for span in report.run.spans)
    assert report.plain.boundary == 8


def test_the_trace_has_a_track_for_collectives_beside_computing(tmp_path: Path) -> None:
    graph, costs = sharded(3)
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    plan = make_plan(graph, costs, budget=top * 7 // 10, planner="auto{effort=1}")
    events = json.loads(_written(plan.as_report(), tmp_path / "trace.trace.json"))["traceEvents"]
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = [event for event in events if event["ph"] == "X" and tracks[event["pid"], event["tid"]] == "collectives"]
    ran = [event for event in shown if event["pid"] == 1]
    expected = [
        (one.start_ns / 1000, one.time_ns / 1000) for one in simulate(graph, costs, plan.schedule).timing.collectives
    ]
    assert sorted((event["ts"], event["dur"]) for event in ran) == expected
    assert {event["pid"] for event in shown} == {1, 2}
    assert "collectives" in str(plan)
    assert "exposed" in str(plan)

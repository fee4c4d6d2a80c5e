"""The memory map: it ends where all that is reserved does, no two rectangles share a byte, and they add up to the profile."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.errors import PlanError
from lowtide.ir import Costs, Graph, load_instance
from lowtide.place import ACCELERATOR_ALIGNMENT, CPU_ALIGNMENT
from lowtide.planning import Plan, make_plan
from lowtide.report.memory_map import Content, MemoryMap, memory_map
from lowtide.report.profile import StepProfile, profile_of_schedule
from lowtide.report.writers import write_report
from lowtide.units import format_bytes
from tests.report.reports import MEASURED, check_map, plan_report, small_plan, trace_report
from tests.solve.small_graphs import small_graph
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds

GRAPHS = Path(__file__).parents[2] / "benchmarks" / "graphs"


def of_plan(graph: Graph, costs: Costs) -> tuple[MemoryMap, StepProfile, Plan]:
    whole = make_plan(graph, costs, budget="100%")
    plan = make_plan(graph, costs, budget=max(whole.curve(points=2).minimum_bytes, 1), planner="auto{effort=0}")
    run = profile_of_schedule(graph, costs, plan.schedule)
    return memory_map(run, plan.layout), run, plan


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_of_any_graph(seed: int) -> None:
    """With results outside of the arena, second copies, generator states, and tensors that are written over others."""
    graph, costs = small_graph(seed, ops=9) if seed % 2 else overwriting(*random_graph(seed, 20), seed)
    found, run, plan = of_plan(graph, costs)
    check_map(found, run, plan)
    lost = plan.reserved_bytes - max((each.end for each in found.rectangles), default=0)
    assert 0 <= lost < (ACCELERATOR_ALIGNMENT if costs.device else 1)


def test_what_lies_outside_is_above_the_block() -> None:
    """Results are the caller's: what is stacked on the block moves down where one below ends, and is never moved into it."""
    seen = 0
    for seed in range(40):
        found, run, plan = of_plan(*small_graph(seed, ops=9))
        outside = [
            block for block, at in zip(run.blocks, plan.layout.offsets, strict=True) if at is None and block.bytes
        ]
        above = [each for each in found.rectangles if each.offset >= found.block_bytes]
        assert {id(each.block) for each in above} == {id(block) for block in outside}
        for block in outside:
            pieces = sorted((each.first, each.last) for each in above if each.block is block)
            assert (pieces[0][0], pieces[-1][1]) == (block.first, block.last)
            assert all(later == last + 1 for (_, last), (later, _) in itertools.pairwise(pieces))
        seen += len(outside) > 1
    assert seen > 5


def test_of_a_transformer() -> None:
    """Aligned to 64 bytes, so that it ends at most that much below what is reserved."""
    graph, costs = load_instance(GRAPHS / "gpt2_2.json")
    plan = make_plan(graph, costs, budget="50%", planner="greedy")
    run = profile_of_schedule(graph, costs, plan.schedule)
    found = memory_map(run, plan.layout)
    check_map(found, run, plan)
    assert max(each.end for each in found.rectangles) > found.reserved_bytes - CPU_ALIGNMENT
    assert {each.content for each in found.rectangles} == {*Content} - {Content.FETCHED}


def test_what_a_rectangle_is() -> None:
    """A chain within 70 %: what is kept of its ten layers, what is made again, and what stays."""
    report = plan_report()
    assert report.memory_map is not None
    found = report.memory_map()
    counts = Counter(each.content for each in found.rectangles)
    assert counts[Content.RECOMPUTED] == sum(span.again for span in report.run.spans) > 0
    for each in found.rectangles:
        span = each.block.span
        assert span is not None
        crosses = each.first < report.run.boundary <= each.last
        assert crosses == (each.content is Content.KEPT)
        if each.content is Content.PASSING:
            assert span.forward
        if each.content in (Content.BACKWARD, Content.GRADIENT):
            assert not span.forward
            assert (each.last == len(report.run.spans)) == (each.content is Content.GRADIENT)


def test_picture_ends_at_what_is_reserved(tmp_path: Path) -> None:
    """Read off as a person would, at the grid: heights are rounded to 0.1."""
    report = plan_report()
    write_report(report, tmp_path / "plan.map.svg")
    root = ElementTree.fromstring((tmp_path / "plan.map.svg").read_text(encoding="utf-8"))
    texts = [str(element.text) for element in root.iter() if str(element.tag).endswith("}text")]
    assert report.memory_map is not None
    found = report.memory_map()
    peak, budget = format_bytes(report.run.peak_bytes), format_bytes(report.budget_bytes)
    assert f"{format_bytes(found.reserved_bytes)} reserved, {peak} live at the peak, budget {budget}" in texts
    assert {content.value for content in Content} - {Content.FETCHED.value} <= {*texts}
    rectangles = [element for element in root.iter() if str(element.tag).endswith("}rect") and len(element)]
    assert len(rectangles) == len(found.rectangles)
    grid = [float(str(element.get("y1"))) for element in root.iter() if element.get("class") == "grid"]
    ticks = [re.fullmatch(r"([\d.]+) (B|KiB)", text) for text in texts]
    labels = [float(match[1]) * {"B": 1, "KiB": 1024}[match[2]] for match in ticks if match]
    scale = labels[-1] / (grid[0] - grid[-1])
    highest = min(float(str(element.get("y"))) for element in rectangles)
    assert (grid[0] - highest) * scale == pytest.approx(found.reserved_bytes, abs=0.2 * scale)
    said = [str(element[0].text) for element in rectangles]
    assert sum("recomputed: " in words for words in said) == sum(span.again for span in report.run.spans)


def test_page_holds_the_map(tmp_path: Path) -> None:
    report = plan_report()
    write_report(report, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    stored = re.search(r'id="tensors">(.*?)</script>', page)
    assert stored is not None and report.memory_map is not None
    data = json.loads(stored[1])
    found = report.memory_map()
    assert len(data["rectangles"]) == len(found.rectangles)
    assert max(address + size for _, _, address, size, _ in data["rectangles"]) == found.reserved_bytes
    for span, level in zip(report.run.spans, report.run.levels(), strict=True):
        there = [size for start, end, _, size, _ in data["rectangles"] if start <= span.start_ns < end]
        assert sum(there) == level
    for words in ("an arena, by these addresses", "with expandable segments", "2.0 MiB"):
        assert words in page
    write_report(report, tmp_path / "plan.txt")
    text = (tmp_path / "plan.txt").read_text(encoding="utf-8")
    assert f"arena             {format_bytes(found.reserved_bytes)} reserved" in text
    assert "CUDA, expandable  2.0 MiB reserved, 2.0 MiB of a device are enough (99." in text


def test_measured_beside_predicted(tmp_path: Path) -> None:
    """On the CPU beside what an arena takes, on CUDA beside its allocator; a recorded run predicts none."""
    plan = small_plan()
    for device, predicted in (("cpu", plan.reserved_bytes), ("cuda:0", plan.cuda_memory().reserved_bytes)):
        measured = dataclasses.replace(MEASURED, device=device, reserved_bytes=7 << 10)
        plan.report(tmp_path / "plan.html", measured)
        page = (tmp_path / "plan.html").read_text(encoding="utf-8")
        row = re.search(r"<tr><td>reserved</td>.*?</tr>", page)
        assert row is not None
        assert re.findall(r">([\d.]+ [KM]iB)<", row[0]) == [format_bytes(predicted), "7.0 KiB"]
    write_report(dataclasses.replace(trace_report(), measured=measured), tmp_path / "trace.html")
    assert re.search(r"<td>reserved</td><td class=\"number\">-</td>", (tmp_path / "trace.html").read_text())


def test_a_recorded_run_has_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"a recorded run has no addresses to draw"):
        write_report(trace_report(), tmp_path / "run.map.svg")
    write_report(trace_report(), tmp_path / "run.html")
    assert 'id="map"' not in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_more_tensors_than_can_be_placed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Leave the other reports as they are, without addresses."""

    def too_many() -> MemoryMap:
        raise PlanError("too many buffers.")

    report = dataclasses.replace(plan_report(), memory_map=too_many)
    for name in ("plan.html", "plan.txt"):
        write_report(report, tmp_path / name)
        assert caplog.messages.pop() == "the report has no addresses: too many buffers."
    assert 'id="map"' not in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "CUDA, expandable" in (tmp_path / "plan.txt").read_text(encoding="utf-8")
    with pytest.raises(PlanError, match="too many buffers"):
        write_report(report, tmp_path / "plan.map.svg")


def test_command(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    outputs = [str(tmp_path / name) for name in ("plan.map.svg", "plan.svg")]
    assert main(["report", str(tmp_path / "plan.json"), *itertools.chain(*(("-o", path) for path in outputs))]) == 0
    of_map, of_memory = (Path(path).read_text(encoding="utf-8") for path in outputs)
    assert 'aria-label="Memory map: ' in of_map
    assert 'aria-label="Memory over the step: ' in of_memory

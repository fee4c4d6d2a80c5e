"""Every writer draws what the simulator says: its peak is the plan's, and it stays below its own budget line."""

from __future__ import annotations

import json
import pickle
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.ir import Compute, keep_all_schedule, simulate
from lowtide.ir.serial import dag_from_json
from lowtide.planning import Plan, make_plan
from lowtide.report.writers import WRITERS
from lowtide.units import format_bytes
from tests.report.reports import check_map
from tests.support.chains import chain_dag
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph

_GRAPHS = [
    (4, 10),
    (12, 10),
    (19, 10),
    (0, 16),
    (13, 16),
    (15, 16),
    (7, 24),
    (25, 24),
    (39, 24),
    (22, 40),
    (40, 40),
    (25, 60),
]
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_MODELS: dict[str, Callable[[], nn.Module]] = {
    "quickstart": lambda: nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    ),
    "in place": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU(inplace=True)) for _ in range(4))),
    "normed": lambda: nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 128), nn.Sigmoid()),
}


def drawn_by_page(path: Path) -> int:
    """In bytes, of the page's data; its charts are those of the picture."""
    found = re.search(r'id="step">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found is not None
    return int(max(json.loads(found[1])["within"]))


def drawn_by_chrome(path: Path) -> int:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return max(e["args"]["bytes"] for e in events if e["name"] == "memory" and e["pid"] == 1)


def drawn_by_snapshot(path: Path) -> int:
    (events,) = pickle.loads(path.read_bytes())["device_traces"]
    signs = {"alloc": 1, "free_completed": -1}
    level = peak = 0
    for event in events:
        level += signs.get(event["action"], 0) * event["size"]
        peak = max(peak, level)
    return peak


DRAWN = {".html": drawn_by_page, ".trace.json": drawn_by_chrome, ".pickle": drawn_by_snapshot}


def check_picture(svg: str, plan: Plan) -> None:
    """Heights of the lines in the picture, read off at its axis as a person would; heights are rounded to 0.1."""
    root = ElementTree.fromstring(svg)
    paths = {e.get("class"): str(e.get("d")) for e in root.iter() if str(e.tag).endswith("path")}
    heights = {
        name: [float(str(e.get("y1"))) for e in root.iter() if e.get("class") == name] for name in ("grid", "budget")
    }
    labels = [re.fullmatch(r"([\d.]+) (B|KiB|MiB)", str(e.text)) for e in root.iter() if e.get("class") == "tick"]
    ticks = [float(found[1]) * _UNITS[found[2]] for found in labels if found]
    floor, bytes_per_unit = heights["grid"][0], ticks[-1] / (heights["grid"][0] - heights["grid"][-1])
    for name, peak in (("plan", plan.peak_bytes), ("plain", plan.unconstrained_peak_bytes)):
        assert (floor - min(_heights(paths[name]))) * bytes_per_unit == pytest.approx(peak, abs=0.2 * bytes_per_unit), (
            name
        )
    assert all(min(_heights(paths["plan"])) >= line for line in heights["budget"])


def _heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"(?:M[\d.]+ |V)([\d.]+)", path)]


def check_text(text: str, plan: Plan) -> None:
    found = re.search(r"at the peak: \d+ blocks, (.*)", text)
    assert found is not None
    assert found[1] == format_bytes(plan.peak_bytes)
    listed = re.search(r"predicted peak +(.*?) \(", text)
    assert listed is not None
    assert listed[1] == format_bytes(plan.peak_bytes)


def check_forms(plan: Plan, folder: Path) -> None:
    for extension in WRITERS:
        path = folder / f"plan{extension}"
        plan.report(path)
        if extension in DRAWN:
            assert DRAWN[extension](path) == plan.peak_bytes <= plan.budget_bytes, extension
    report = plan.as_report()
    assert report.memory_map is not None
    check_map(report.memory_map(), report.run, plan)
    check_text((folder / "plan.txt").read_text(encoding="utf-8"), plan)
    page = (folder / "plan.html").read_text(encoding="utf-8")
    charts = re.findall(r'<svg (?:(?!</svg>).)*class="plain".*?</svg>', page, re.DOTALL)
    assert len(charts) == 2
    for svg in ((folder / "plan.svg").read_text(encoding="utf-8"), *charts):
        check_picture(svg, plan)


@pytest.mark.parametrize(("seed", "ops"), _GRAPHS)
def test_of_graphs_that_overwrite(seed: int, ops: int, tmp_path: Path) -> None:
    graph, costs = overwriting(*random_graph(seed, ops), seed)
    plain = make_plan(graph, costs, budget="100%")
    least = make_plan(graph, costs, budget=max(plain.curve(points=2).minimum_bytes, 1), planner="auto{effort=1}")
    for plan in (plain, least):
        check_forms(plan, tmp_path)


def test_what_the_graphs_overwrite_matters() -> None:
    """So that the test above says something: counting twice what is written over makes a higher peak."""
    for seed, ops in _GRAPHS:
        graph, costs = overwriting(*random_graph(seed, ops), seed)
        schedule = keep_all_schedule(graph)
        result = simulate(graph, costs, schedule)
        twice = [
            int(level + costs.storage_bytes[step.into])
            for step, level in zip(schedule.steps, result.timeline, strict=True)
            if isinstance(step, Compute) and step.into is not None
        ]
        assert max(twice) > result.peak_bytes


def test_of_a_chain(tmp_path: Path) -> None:
    for budget in ("100%", "70%", "50%"):
        check_forms(make_plan(*dag_from_json(chain_dag(10)), budget=budget), tmp_path)


@pytest.mark.parametrize("name", _MODELS)
def test_of_captured_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    for budget in ("100%", "85%"):
        plan = lowtide.plan(_MODELS[name](), (torch.randn(4096, 128),), budget=budget)
        check_forms(plan, tmp_path)

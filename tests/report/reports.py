"""Reports of small things, with everything a report can have."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from lowtide.ir.serial import dag_from_json
from lowtide.memory.measurement import Measurement
from lowtide.planning import Plan, make_plan
from lowtide.report.memory_map import MemoryMap
from lowtide.report.profile import StepProfile
from lowtide.report.report import Report, report_of_trace
from lowtide.trace import Created, OperatorCall, Release, Trace
from tests.support.chains import LAYER_BYTES, chain_dag

MEASURED = Measurement(3 * LAYER_BYTES, 400, "cpu", ((0, 0), (100, 2000), (200, 3000), (390, 0)), 0)
HOSTILE = '</script><script>alert(1)</script>&"'


def small_plan(name: str = "chain") -> Plan:
    """Ten layers within 70 %, with modules, sources and a curve."""
    graph, costs = dag_from_json(chain_dag(10))
    ops = [
        dataclasses.replace(op, module=f"layers.{op.id % 10}.linear", source=f"/home/me/model.py:{op.id + 1}")
        for op in graph.ops
    ]
    graph = dataclasses.replace(graph, name=name, ops=tuple(ops))
    return make_plan(graph, costs, budget="70%", planner="auto{effort=1}").with_curve(points=4)


def plan_report(name: str = "chain") -> Report:
    return small_plan(name).as_report(MEASURED)


def trace_of_chain(layers: int = 8) -> Trace:
    """Forward, then backward in reverse, each result as large as the others."""
    forward = [OperatorCall(f"layer{i}", 10, (i - 1,) if i else (), (Created(i, LAYER_BYTES),)) for i in range(layers)]
    events: list[OperatorCall | Release] = [*forward]
    for i in range(layers):
        reads = (layers - 1 - i, layers + i - 1) if i else (layers - 1,)
        events.append(OperatorCall(f"gradient{i}", 20, reads, (Created(layers + i, LAYER_BYTES),)))
        events.append(Release(layers - 1 - i))
        events += [Release(layers + i - 1)] if i else []
    return Trace(tuple(events), "recorded", "cpu", 6 * LAYER_BYTES, layers)


def trace_report() -> Report:
    return report_of_trace(trace_of_chain())


def write_page(folder: Path, report: Report) -> Path:
    from lowtide.report.writers import write_report

    path = folder / "report.html"
    write_report(report, path)
    return path


def check_map(found: MemoryMap, run: StepProfile, plan: Plan) -> None:
    """Nothing is above what is reserved, no two rectangles share a byte, and they add up to the profile."""
    assert max((each.end for each in found.rectangles), default=0) <= found.reserved_bytes == plan.reserved_bytes
    levels = [0] * (len(run.spans) + 1)
    for each in found.rectangles:
        assert each.offset >= 0 <= each.first <= each.last <= len(run.spans)
        for span in range(each.first, each.last + 1):
            levels[span] += each.block.bytes
    assert levels[:-1] == run.levels()
    assert levels[-1] == run.final_bytes
    for span in range(len(run.spans) + 1):
        there = sorted((each.offset, each.end) for each in found.rectangles if each.first <= span <= each.last)
        assert all(end <= offset for (_, end), (offset, _) in itertools.pairwise(there))

"""A report as Chrome Trace Event JSON, for Perfetto and chrome://tracing.

There are two processes: the step within the budget, and the plain step. Each has tracks for the forward pass, the
backward pass, recomputations and modules, and a counter for memory. Transfers have two tracks and collectives that
overlap with computing have one, if there are any. Times are in microseconds, and events are in file order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowtide.report.modules import block_of
from lowtide.report.profile import FETCH, OFFLOAD, Span, StepProfile
from lowtide.report.report import Report

_TRACKS = {1: "forward", 2: "backward", 3: "recomputation", 4: "modules"}
_TRANSFERS = {5: "to the second memory", 6: "back from it"}
_COLLECTIVES = {7: "collectives"}


def chrome_trace(report: Report) -> str:
    """The JSON text. Events after the metadata are in order of time."""
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for pid, name, run in (1, f"within {report.budget_bytes} bytes", report.run), (2, "without a budget", report.plain):
        tracks = _TRACKS | (_TRANSFERS if run.transfers else {}) | (_COLLECTIVES if run.collectives else {})
        names += _names(pid, f"{report.title}, {name}", tracks)
        events += _events(run, pid)
    events += [_counter("budget", 1, at_ns, report.budget_bytes) for at_ns in (0, report.run.time_ns)]
    events.sort(key=lambda event: event["ts"])
    about = {"decided by": report.decided_by, "device": report.device, "budget_bytes": report.budget_bytes}
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about})


def _names(pid: int, process: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    for tid, name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _events(run: StepProfile, pid: int) -> Iterator[dict[str, Any]]:
    for span, level in zip(run.spans, run.levels(), strict=True):
        yield _counter("memory", pid, span.start_ns, level)
        about = {"target": span.target, "module": span.module, "source": span.source, "bytes while it runs": level}
        if span.target == FETCH:
            continue
        event = _complete(pid, 3 if span.again else 1 if span.forward else 2, span.name, [span])
        yield event | {"args": {key: value for key, value in about.items() if value}}
    for transfer in run.transfers:
        yield _complete(pid, 5 if transfer.target == OFFLOAD else 6, transfer.name, [transfer])
    for one in run.collectives:
        about = {"target": one.target, "module": one.module, "again": one.again}
        yield _complete(pid, 7, one.name, [one]) | {"args": {key: value for key, value in about.items() if value}}
    yield _counter("memory", pid, run.time_ns, run.final_bytes)
    for name, group in itertools.groupby(run.spans, key=lambda span: block_of(span.module)):
        if name:
            yield _complete(pid, 4, name, list(group))


def _complete(pid: int, track: int, name: str, spans: Sequence[Span]) -> dict[str, Any]:
    start_ns, time_ns = spans[0].start_ns, spans[-1].end_ns - spans[0].start_ns
    return {"ph": "X", "name": name, "pid": pid, "tid": track, "ts": start_ns / 1000, "dur": time_ns / 1000}


def _counter(name: str, pid: int, at_ns: int, level: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "ts": at_ns / 1000, "args": {"bytes": level}}

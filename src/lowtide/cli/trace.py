"""``lowtide trace FILE``: replay a recorded program within a budget, with evictions by a heuristic; needs neither a
model nor torch.

FILE is a lowtide-trace/1 file or a log as published with DTR, compressed if its name ends in .gz. Percentages in
``--budget`` are of the peak without evictions. Several budgets or heuristics give a table of slowdowns, OOM and thrash.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

from lowtide.budget import parse_budget
from lowtide.cli.options import given, seed
from lowtide.errors import InfeasibleBudgetError, LowtideError, PlanError
from lowtide.eviction import heuristic_named
from lowtide.report.tables import fact_lines, table_lines
from lowtide.store import write_atomically
from lowtide.trace import (
    ReplayStatus,
    Trace,
    read_trace,
    simulate,
    trace_to_dag,
    trace_to_graph,
    unconstrained_peak_bytes,
)
from lowtide.units import exact_bytes, format_bytes, format_time, overhead_percent


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="lowtide-trace/1, or a log published with DTR")
    add("--budget", metavar="LIST", help='for instance "50%%" or "70%%,50%%,8GiB"')
    add("--heuristic", default="dtr-eq", metavar="LIST", help='for instance "dtr-eq,lru" (default: dtr-eq)')
    add("--policy", default="eager", help="eager, ignore or banish what was released (default: eager)")
    add("--sample", action="store_true", help="choose from a random sample of root-many storages")
    add("--skip-small", action="store_true", help="leave out storages below 1 %% of the mean size")
    add("--thrash", type=float, default=2.0, metavar="TIMES", help="give up over this slowdown (default: 2)")
    add("--seed", type=seed, default=0, help="of samples and of the heuristic random (default: 0)")
    add("--json", action="store_true", help="print a JSON object per replay, a line each")
    add("--to-dag", metavar="OUT.json", help="write the program as lowtide-dag/1")
    add("--to-graph", metavar="OUT.json", help="as lowtide-graph/1, with views and several results per op")


def run(options: argparse.Namespace) -> int:
    if not options.thrash >= 1:
        raise PlanError(f"--thrash is {options.thrash:g}, but must be at least 1.")
    trace = read_trace(options.file)
    peak_bytes, calls = unconstrained_peak_bytes(trace), sum(1 for _ in trace.calls())
    for path, convert in ((options.to_dag, trace_to_dag), (options.to_graph, trace_to_graph)):
        if path:
            data = convert(trace)
            if not data["ops"]:
                raise LowtideError("the trace has no calls, so there is no graph to write.")
            write_atomically(Path(path), json.dumps(data) + "\n")
    title = f"{trace.name or 'trace'}: {calls} calls, {format_time(trace.time_ns)}, peak {format_bytes(peak_bytes)}"
    if options.budget is None:
        if not (options.to_dag or options.to_graph):
            facts = {"name": trace.name, "device": trace.device, "calls": calls, "time_ns": trace.time_ns}
            facts |= {"unconstrained_peak_bytes": peak_bytes, "budget_bytes": trace.budget_bytes}
            print(json.dumps(facts) if options.json else title)
        return 0
    runs = _runs(trace, peak_bytes, options)
    lines = [json.dumps(run) for run in runs]
    if not options.json:
        lines = [title, *(_run_lines(runs[0]) if len(runs) == 1 else _table(runs))]
    print("\n".join(lines))
    _expect_room(runs)
    return 0


def _runs(trace: Trace, peak_bytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What ``--json`` prints, in the order of the options."""
    heuristics = [name.strip() for name in options.heuristic.split(",")]
    budgets = {text.strip(): parse_budget(text.strip(), peak_bytes) for text in options.budget.split(",")}
    for heuristic in heuristics:
        heuristic_named(heuristic)
    found = []
    for heuristic, (text, budget_bytes) in itertools.product(heuristics, budgets.items()):
        began = time.perf_counter()
        asked = given(options, "policy", "sample", "skip_small", "seed")
        result = simulate(trace, budget_bytes, heuristic, **asked, most_slowdown=options.thrash)
        whole = result.status is ReplayStatus.OK
        replayed = ("time_ns", "base_ns", "evictions", "rematerializations")
        summary = {
            "status": result.status.value,
            "heuristic": heuristic,
            "policy": options.policy,
            "budget": text,
            "budget_bytes": budget_bytes,
            "unconstrained_peak_bytes": peak_bytes,
            "peak_bytes": result.peak_bytes,
            "slowdown": round(result.slowdown, 6) if whole else None,
            "overhead_percent": overhead_percent(result.time_ns, result.base_ns) if whole else None,
            **{name: getattr(result, name) for name in replayed},
            "operator": result.operator or None,
            "seconds": round(time.perf_counter() - began, 6),
        }
        found.append(summary)
    return found


def _run_lines(run: dict[str, Any]) -> list[str]:
    facts = {
        "budget": exact_bytes(run["budget_bytes"]),
        "peak": exact_bytes(run["peak_bytes"]),
    }
    ended = {"ended   ": f"in {run['operator']}"} if run["slowdown"] is None else {"slowdown": f"{run['slowdown']:.4f}"}
    counts = f"  evictions {run['evictions']}, rematerializations {run['rematerializations']}"
    return [f"{run['status']} with {run['heuristic']}, {run['policy']}", *fact_lines(facts | ended), counts]


def _table(runs: list[dict[str, Any]]) -> list[str]:
    rows = [["heuristic", *dict.fromkeys(run["budget"] for run in runs)]]
    for heuristic, own in itertools.groupby(runs, key=lambda run: run["heuristic"]):
        cells = [run["status"] if run["slowdown"] is None else f"{run['slowdown']:.4f}" for run in own]
        rows.append([heuristic, *cells])
    return table_lines(rows)


def _expect_room(runs: list[dict[str, Any]]) -> None:
    """Raises ``InfeasibleBudgetError`` if no replay had enough memory."""
    if all(run["status"] == ReplayStatus.OUT_OF_MEMORY.value for run in runs):
        last, whole = runs[-1], runs[-1]["unconstrained_peak_bytes"]
        raise InfeasibleBudgetError(
            f"at {last['budget_bytes']} bytes there is nothing left to evict when {last['operator']} is to run; "
            f"without evictions the program needs {whole} bytes.",
            minimum_bytes=whole,
            operator=last["operator"],
        )

"""``lowtide solve FILE.json``: plan a graph with given costs; needs neither a model nor torch.

The steps of ``--json`` are ``["compute", op]`` and ``["free", op]``. In a graph where one op owns several storages, or
none, the number after ``"free"`` is the storage's; random ops add ``["save_rng", op]`` and ``["restore_rng", op]``.
The certified gap is how far the schedule's time lies above the proven lower bound, in percent of that bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from lowtide.budget import parse_budget
from lowtide.cli.options import Subparsers, add_budget_option, add_planner_options
from lowtide.cli.progress import progress_bar
from lowtide.ir import Costs, Graph, Schedule, check, keep_all_schedule, load_instance, schedule_to_json, simulate
from lowtide.planning import infeasible
from lowtide.report.curve import lowest_schedule
from lowtide.report.tables import fact_lines
from lowtide.solve import Problem, Solution, peak_lower_bound, solve
from lowtide.store import write_atomically
from lowtide.units import format_bytes, format_percent, format_time, overhead_percent


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("solve", help="plan a graph from a file", description=__doc__)
    parser.add_argument("file", metavar="FILE.json", help="lowtide-dag/1, lowtide-graph/1 or a saved plan")
    target = parser.add_mutually_exclusive_group(required=True)
    add_budget_option(target, required=False)
    target.add_argument("--min-peak", action="store_true", help="find the smallest budget, and a bound below it")
    add_planner_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, the schedule included")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the schedule (lowtide-schedule/1)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    graph, costs = load_instance(options.file)
    unconstrained = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    if options.min_peak:
        return _run_min_peak(graph, costs, unconstrained, options)
    budget = parse_budget(options.budget, unconstrained)
    with progress_bar() as on_progress:
        problem = Problem(graph, costs, budget, options.seed, on_progress)
        solution = solve(problem, options.planner)
    summary = _summary(solution, costs, budget, unconstrained)
    if options.json:
        print(json.dumps(summary))
    if solution.schedule is None:
        raise infeasible(problem, solution, unconstrained, options.planner)
    if options.output:
        _write_schedule(solution.schedule, options.output)
    if not options.json:
        _print_summary(summary)
    return 0


def _run_min_peak(graph: Graph, costs: Costs, unconstrained: int, options: argparse.Namespace) -> int:
    """The smallest budget that the planner reaches, and the proven bound below every budget."""
    began = time.perf_counter()
    with progress_bar() as on_progress:
        schedule = lowest_schedule(graph, costs, options.planner, options.seed, on_progress)
    bound = peak_lower_bound(graph, costs)
    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    summary = {
        "status": "optimal" if result.peak_bytes <= bound else "feasible",
        "minimum_bytes": result.peak_bytes,
        "lower_bound_bytes": bound,
        "gap_percent": 100 * (result.peak_bytes / bound - 1) if bound else 0.0,
        "time_ns": result.time_ns,
        "overhead_percent": overhead_percent(result.time_ns, costs.total_time_ns),
        "planner": options.planner,
        "unconstrained_peak_bytes": unconstrained,
        "solve_seconds": round(time.perf_counter() - began, 6),
    }
    if options.json:
        print(json.dumps(summary | {"schedule": schedule_to_json(schedule)["steps"]}))
    else:
        _print_min_peak(summary)
    if options.output:
        _write_schedule(schedule, options.output)
    return 0


def _write_schedule(schedule: Schedule, path: str) -> None:
    write_atomically(Path(path), json.dumps(schedule_to_json(schedule)))
    print(f"schedule written to {path}", file=sys.stderr)


def _summary(solution: Solution, costs: Costs, budget: int, unconstrained: int) -> dict[str, Any]:
    """What ``--json`` prints; null where there is no schedule."""
    found, bound, least = solution.schedule is not None, solution.lower_bound_ns, costs.total_time_ns
    return {
        "status": solution.status.value,
        "planner": solution.planner,
        "budget_bytes": budget,
        "peak_bytes": solution.peak_bytes if found else None,
        "unconstrained_peak_bytes": unconstrained,
        "time_ns": solution.time_ns if found else None,
        "overhead_percent": overhead_percent(solution.time_ns, least) if found else None,
        "lower_bound_percent": None if bound is None else overhead_percent(bound, least),
        "lower_bound_ns": bound,
        "gap_percent": 100 * (solution.time_ns / bound - 1) if found and bound else None,
        "solve_seconds": round(solution.solve_seconds, 6),
        "schedule": None if solution.schedule is None else schedule_to_json(solution.schedule)["steps"],
    }


def _print_summary(summary: dict[str, Any]) -> None:
    bound, gap = summary["lower_bound_percent"], summary["gap_percent"]
    peak, budget, whole = (summary[key] for key in ("peak_bytes", "budget_bytes", "unconstrained_peak_bytes"))
    computes = sum(step[0] == "compute" for step in summary["schedule"])
    below = "none" if bound is None else f"{bound:.3f} %"
    facts = {
        "budget": f"{format_bytes(budget)} ({budget} bytes), unconstrained peak {format_bytes(whole)}",
        "peak": f"{format_bytes(peak)} ({peak} bytes)",
        "overhead": f"{summary['overhead_percent']:.3f} % (lower bound {below})",
    }
    if gap is not None:
        least = format_time(summary["lower_bound_ns"])
        facts["gap"] = f"{gap:.3f} %: no schedule within the budget is quicker than {least}"
    facts["time"] = f"{format_time(summary['time_ns'])} in {computes} computes"
    print(f"{summary['status']} by {summary['planner']} in {summary['solve_seconds']:.2f} s")
    print("\n".join(fact_lines(facts)))


def _print_min_peak(summary: dict[str, Any]) -> None:
    least, bound, whole = (summary[f"{key}_bytes"] for key in ("minimum", "lower_bound", "unconstrained_peak"))
    facts = {
        "budget": f"{format_bytes(least)} ({least} bytes), {format_percent(least / max(whole, 1))} of the peak",
        "bound": f"{format_bytes(bound)} ({bound} bytes): no schedule has a lower peak",
        "gap": f"{summary['gap_percent']:.3f} %",
        "overhead": f"{summary['overhead_percent']:.3f} % at that budget",
    }
    print(f"smallest budget reached by {summary['planner']} in {summary['solve_seconds']:.2f} s")
    print("\n".join(fact_lines(facts)))

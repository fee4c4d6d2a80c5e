"""``lowtide solve FILE.json``: plan a graph with given costs; needs neither a model nor torch.

The steps of ``--json`` are ``["compute", op]`` and ``["free", op]``. In a graph where one op owns several storages, or
none, the number after ``"free"`` is the storage's; random ops add ``["save_rng", op]`` and ``["restore_rng", op]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.options import Subparsers, add_planning_options
from lowtide.cli.progress import progress_bar

if TYPE_CHECKING:
    from lowtide.ir import Costs
    from lowtide.solve import Solution


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("solve", help="plan a graph from a file", description=__doc__)
    parser.add_argument("file", metavar="FILE.json", help="lowtide-dag/1, lowtide-graph/1 or a saved plan")
    add_planning_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, the schedule included")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the schedule (lowtide-schedule/1)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from lowtide.budget import parse_budget
    from lowtide.ir import keep_all_schedule, simulate
    from lowtide.ir.serial import load_instance, schedule_to_json
    from lowtide.planning import infeasible, write_atomically
    from lowtide.solve import Problem, solve

    graph, costs = load_instance(options.file)
    unconstrained = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
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
        write_atomically(Path(options.output), json.dumps(schedule_to_json(solution.schedule)))
        print(f"schedule written to {options.output}", file=sys.stderr)
    if not options.json:
        _print_summary(summary)
    return 0


def _summary(solution: Solution, costs: Costs, budget: int, unconstrained: int) -> dict[str, Any]:
    """What ``--json`` prints; null where there is no schedule."""
    found = solution.schedule is not None
    return {
        "status": solution.status.value,
        "planner": solution.planner,
        "budget_bytes": budget,
        "peak_bytes": solution.peak_bytes if found else None,
        "unconstrained_peak_bytes": unconstrained,
        "time_ns": solution.time_ns if found else None,
        "overhead_percent": _over(solution.time_ns, costs) if found else None,
        "lower_bound_percent": None if solution.lower_bound_ns is None else _over(solution.lower_bound_ns, costs),
        "solve_seconds": round(solution.solve_seconds, 6),
        "schedule": _steps(solution),
    }


def _over(time_ns: int, costs: Costs) -> float:
    """Percent above the program without recomputation."""
    return 100 * (time_ns / costs.total_time_ns - 1) if costs.total_time_ns else 0.0


def _steps(solution: Solution) -> list[list[Any]] | None:
    from lowtide.ir.serial import schedule_to_json

    if solution.schedule is None:
        return None
    steps: list[list[Any]] = schedule_to_json(solution.schedule)["steps"]
    return steps


def _print_summary(summary: dict[str, Any]) -> None:
    from lowtide.report.units import format_bytes, format_time

    bound = summary["lower_bound_percent"]
    peak, budget, whole = (summary[key] for key in ("peak_bytes", "budget_bytes", "unconstrained_peak_bytes"))
    again = sum(kind == "compute" for kind, _ in summary["schedule"])
    print(f"{summary['status']} by {summary['planner']} in {summary['solve_seconds']:.2f} s")
    print(f"  budget    {format_bytes(budget)} ({budget} bytes), unconstrained peak {format_bytes(whole)}")
    print(f"  peak      {format_bytes(peak)} ({peak} bytes)")
    print(
        f"  overhead  {summary['overhead_percent']:.3f} % (lower bound {'none' if bound is None else f'{bound:.3f} %'})"
    )
    print(f"  time      {format_time(summary['time_ns'])} in {again} computes")

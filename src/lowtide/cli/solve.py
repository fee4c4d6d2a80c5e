"""``lowtide solve FILE.json``: plan a graph with given costs; needs neither a model nor torch.

The steps of ``--json`` are ``["compute", op]`` and ``["free", op]``. In a graph where one op owns several storages, or
none, the number after ``"free"`` is the storage's; random ops add ``["save_rng", op]`` and ``["restore_rng", op]``.
The certified gap is how far the schedule's time lies above the proven lower bound, in percent of that bound.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from lowtide.cli.options import Subparsers, add_budget_option, add_planner_options
from lowtide.cli.progress import progress_bar
from lowtide.cli.schedules import schedule_steps, write_schedule

if TYPE_CHECKING:
    from lowtide.ir import Costs
    from lowtide.solve import Solution


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
    if options.min_peak:
        from lowtide.cli.min_peak import run_min_peak

        return run_min_peak(options)
    from lowtide.budget import parse_budget
    from lowtide.ir import keep_all_schedule, simulate
    from lowtide.ir.serial import load_instance
    from lowtide.planning import infeasible
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
        write_schedule(solution.schedule, options.output)
    if not options.json:
        _print_summary(summary)
    return 0


def _summary(solution: Solution, costs: Costs, budget: int, unconstrained: int) -> dict[str, Any]:
    """What ``--json`` prints; null where there is no schedule."""
    from lowtide.units import overhead_percent

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
        "schedule": None if solution.schedule is None else schedule_steps(solution.schedule),
    }


def _print_summary(summary: dict[str, Any]) -> None:
    from lowtide.units import format_bytes, format_time

    bound, gap = summary["lower_bound_percent"], summary["gap_percent"]
    peak, budget, whole = (summary[key] for key in ("peak_bytes", "budget_bytes", "unconstrained_peak_bytes"))
    again = sum(step[0] == "compute" for step in summary["schedule"])
    print(f"{summary['status']} by {summary['planner']} in {summary['solve_seconds']:.2f} s")
    print(f"  budget    {format_bytes(budget)} ({budget} bytes), unconstrained peak {format_bytes(whole)}")
    print(f"  peak      {format_bytes(peak)} ({peak} bytes)")
    below = "none" if bound is None else f"{bound:.3f} %"
    print(f"  overhead  {summary['overhead_percent']:.3f} % (lower bound {below})")
    if gap is not None:
        print(
            f"  gap       {gap:.3f} %: no schedule within the budget is quicker than {format_time(summary['lower_bound_ns'])}"
        )
    print(f"  time      {format_time(summary['time_ns'])} in {again} computes")

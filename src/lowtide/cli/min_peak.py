"""``lowtide solve --min-peak``: the smallest budget that a planner reaches, and the proven bound below every budget."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from lowtide.cli.progress import Progress, progress_bar
from lowtide.cli.schedules import schedule_steps, write_schedule

if TYPE_CHECKING:
    from lowtide.ir import Costs, Graph, Schedule


def run_min_peak(options: argparse.Namespace) -> int:
    from lowtide.ir import keep_all_schedule, load_instance, simulate
    from lowtide.solve import peak_lower_bound

    graph, costs = load_instance(options.file)
    began = time.perf_counter()
    with progress_bar() as on_progress:
        schedule = _lowest(graph, costs, options.planner, options.seed, on_progress)
    bound = peak_lower_bound(graph, costs)
    summary = _summary(graph, costs, schedule, bound)
    summary |= {
        "planner": options.planner,
        "unconstrained_peak_bytes": simulate(graph, costs, keep_all_schedule(graph)).peak_bytes,
        "solve_seconds": round(time.perf_counter() - began, 6),
    }
    if options.json:
        print(json.dumps(summary | {"schedule": schedule_steps(schedule)}))
    else:
        _print_summary(summary)
    if options.output:
        write_schedule(schedule, options.output)
    return 0


def _lowest(graph: Graph, costs: Costs, planner: str, seed: int, on_progress: Progress | None) -> Schedule:
    """The lowest schedule that the planner names when asked for the impossible."""
    from lowtide.solve import Problem, minimum_peak, solve

    solution = solve(Problem(graph, costs, 1, seed, on_progress), planner)
    lowest = solution.schedule or solution.lowest_schedule
    return lowest if lowest is not None else minimum_peak(graph, costs, seed)[1]


def _summary(graph: Graph, costs: Costs, schedule: Schedule, bound: int) -> dict[str, Any]:
    from lowtide.ir import check, simulate
    from lowtide.units import overhead_percent

    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    return {
        "status": "optimal" if result.peak_bytes <= bound else "feasible",
        "minimum_bytes": result.peak_bytes,
        "lower_bound_bytes": bound,
        "gap_percent": 100 * (result.peak_bytes / bound - 1) if bound else 0.0,
        "time_ns": result.time_ns,
        "overhead_percent": overhead_percent(result.time_ns, costs.total_time_ns),
    }


def _print_summary(summary: dict[str, Any]) -> None:
    from lowtide.units import format_bytes, format_percent

    least, bound, whole = (summary[f"{key}_bytes"] for key in ("minimum", "lower_bound", "unconstrained_peak"))
    print(f"smallest budget reached by {summary['planner']} in {summary['solve_seconds']:.2f} s")
    print(f"  budget    {format_bytes(least)} ({least} bytes), {format_percent(least / max(whole, 1))} of the peak")
    print(f"  bound     {format_bytes(bound)} ({bound} bytes): no schedule has a lower peak")
    print(f"  gap       {summary['gap_percent']:.3f} %")
    print(f"  overhead  {summary['overhead_percent']:.3f} % at that budget")

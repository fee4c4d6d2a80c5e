"""``lowtide solve FILE.json``: plan a graph with given costs; needs neither a model nor torch.

The steps of ``--json`` are ``["compute", op]`` and ``["free", op]``. In a graph in which an op owns several storages or
none, the number after ``"free"`` is a storage. Random ops add ``["save_rng", op]`` and ``["restore_rng", op]``. With
``--offload``, or if the graph has a second memory, there are also ``["offload", storage]`` and ``["fetch", storage]``,
and ``transfers`` lists the moves and how long operators wait for them. With ``--layout``, ``offsets`` has the addresses
in bytes, in one block of memory, of the results of each ``["compute", op]`` and ``["fetch", storage]``, in their order.
``reserved_bytes`` is the size of all memory: the block, workspaces and resident tensors. The budget then limits these
bytes. ``cuda`` is what the schedule takes without addresses, under PyTorch's allocator for CUDA. The certified gap is
how far the schedule's time lies above the proven lower bound, in percent of that bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.budget import parse_budget
from lowtide.cli.options import add_budget_option, add_planner_options, add_second_memory_options, with_second_memory
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import (
    Compute,
    Costs,
    Graph,
    Schedule,
    check,
    keep_all_schedule,
    load_instance,
    plain_time_ns,
    schedule_to_json,
    simulate,
)
from lowtide.place import ACCELERATOR_ALIGNMENT, CPU_ALIGNMENT, Layout, cuda_memory, lay_out, solve_placed
from lowtide.planning import infeasible
from lowtide.progress import Progress, progress_bar
from lowtide.report.curve import lowest_schedule
from lowtide.report.tables import fact_lines
from lowtide.report.text import collectives_text, cuda_facts, moved_text
from lowtide.solve import Problem, Solution, Status, peak_lower_bound, solve
from lowtide.store import write_atomically
from lowtide.units import exact_bytes, format_bytes, format_percent, format_time, overhead_percent


class Found(NamedTuple):
    """A schedule, the other fields that ``--json`` prints, and the text."""

    schedule: Schedule
    summary: dict[str, Any]
    heading: str
    facts: dict[str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE.json", help="a lowtide-dag, a lowtide-graph or a saved plan")
    target = parser.add_mutually_exclusive_group(required=True)
    add_budget_option(target)
    target.add_argument("--min-peak", action="store_true", help="find the smallest budget, and a bound below it")
    add_planner_options(parser)
    add("--json", action="store_true", help="print one JSON object, the schedule included")
    add("--layout", action="store_true", help="give every tensor of the schedule an address")
    by_device = f"{CPU_ALIGNMENT} on a CPU, {ACCELERATOR_ALIGNMENT} on an accelerator, 1 for costs of no device"
    text = f"of addresses, in bytes (default: {by_device})"
    add("--align", type=int, metavar="BYTES", help=text)
    add_second_memory_options(parser)
    add("-o", "--output", metavar="FILE", help="write the schedule (lowtide-schedule/1)")


def run(options: argparse.Namespace) -> int:
    graph, costs = load_instance(options.file)
    costs = with_second_memory(costs, options)
    unconstrained = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    find = _smallest_budget if options.min_peak else _within_budget
    with progress_bar() as on_progress:
        found = find(graph, costs, unconstrained, options, on_progress)
    if options.layout and options.min_peak:
        layout = lay_out(graph, costs, found.schedule, alignment=options.align, seed=options.seed)
        _add_addresses(found, graph, costs, layout)
    written = schedule_to_json(found.schedule)
    if options.output:
        write_atomically(Path(options.output), json.dumps(written))
        print(f"schedule written to {options.output}", file=sys.stderr)
    text = "\n".join([found.heading, *fact_lines(found.facts)])
    print(json.dumps(found.summary | {"schedule": written["steps"]}) if options.json else text)
    return 0


def _add_addresses(found: Found, graph: Graph, costs: Costs, layout: Layout) -> None:
    """Add the addresses of ``layout``, and what CUDA's allocator would reserve without them."""
    reserved, placement = layout.reserved_bytes, layout.placement
    native, expandable = (cuda_memory(graph, costs, layout.schedule, expandable_segments=e) for e in (False, True))
    cuda = {"native": asdict(native), "expandable": asdict(expandable)}
    found.summary.update(offsets=layout.of_steps(), reserved_bytes=reserved, cuda=cuda)
    bound = f"at most {100 * placement.gap:.3f} % above the least" if placement.gap else "no placement takes up less"
    found.facts["reserved"] = f"{exact_bytes(reserved)} with addresses, {bound}"
    found.facts.update(cuda_facts(native, expandable))


def _no_addresses(solution: Solution, layout: Layout, budget: int) -> InfeasibleBudgetError:
    """The error for a schedule within the budget whose addresses exceed it."""
    reserved = layout.reserved_bytes
    return InfeasibleBudgetError(
        f"no schedule was found whose addresses fit {budget} bytes ({format_bytes(budget)}): the lowest take up {reserved} "
        f"bytes ({format_bytes(reserved)}), of a schedule that peaks at {solution.peak_bytes} bytes. Raise the budget by "
        f"{reserved - budget} bytes, or plan without --layout.",
        minimum_bytes=reserved,
        budget_bytes=budget,
    )


def _within_budget(
    graph: Graph, costs: Costs, unconstrained: int, options: argparse.Namespace, on_progress: Progress | None
) -> Found:
    """The planner's answer for ``--budget``."""
    budget = parse_budget(options.budget, unconstrained)
    problem = Problem(graph, costs, budget, options.seed, on_progress)
    placed = solve_placed(problem, options.planner, alignment=options.align) if options.layout else None
    solution = placed.solution if placed else solve(problem, options.planner)
    layout = placed.layout if placed else None
    over = layout is not None and layout.reserved_bytes > budget
    found = solution.schedule is not None and not over
    bound, least = solution.lower_bound_ns, plain_time_ns(graph, costs)
    peak, time_ns = solution.peak_bytes, solution.time_ns
    overhead, gap = overhead_percent(time_ns, least), 100 * (time_ns / bound - 1) if found and bound else None
    lower_bound = None if bound is None else overhead_percent(bound, least)
    summary: dict[str, Any] = {
        "status": Status.UNSOLVED.value if over else solution.status.value,
        "planner": solution.planner,
        "budget_bytes": budget,
        "peak_bytes": peak if found else None,
        "unconstrained_peak_bytes": unconstrained,
        "time_ns": time_ns if found else None,
        "overhead_percent": overhead if found else None,
        "lower_bound_percent": lower_bound,
        "lower_bound_ns": bound,
        "gap_percent": gap,
        "solve_seconds": round(solution.solve_seconds, 6),
    }
    if solution.schedule is None or over:
        if options.json:
            print(json.dumps(summary | {"schedule": None}))
        if layout is not None:
            raise _no_addresses(solution, layout, budget)
        raise infeasible(problem, solution, unconstrained, options.planner)
    below = "none" if lower_bound is None else f"{lower_bound:.3f} %"
    facts = {
        "budget": f"{exact_bytes(budget)}, unconstrained peak {format_bytes(unconstrained)}",
        "peak": exact_bytes(peak),
        "overhead": f"{overhead:.3f} % (lower bound {below})",
    }
    if gap is not None:
        facts["gap"] = f"{gap:.3f} %: no schedule within the budget is quicker than {format_time(bound or 0)}"
    computes = sum(isinstance(step, Compute) for step in solution.schedule.steps)
    facts["time"] = f"{format_time(time_ns)} in {computes} computes"
    timing = simulate(graph, costs, solution.schedule).timing
    if costs.second_memory is not None:
        moved = ("offloaded_bytes", "fetched_bytes", "second_peak_bytes", "wait_ns")
        summary["transfers"] = {name: getattr(timing, name) for name in moved}
        facts["transfers"] = moved_text(timing)
    if costs.collectives_beside:
        summary["collectives"] = {"time_ns": timing.collective_ns, "exposed_ns": timing.exposed_ns}
        facts["collectives"] = collectives_text(timing)
    heading = f"{solution.status.value} by {solution.planner} in {solution.solve_seconds:.2f} s"
    answer = Found(solution.schedule, summary, heading, facts)
    if placed and layout:  # the cost of having addresses, not only bytes, within the budget
        counted = summary["counted_overhead_percent"] = overhead_percent(placed.counted.time_ns, least)
        more = f"{overhead - counted:.3f} points of overhead more than with counted bytes in the budget"
        facts["placement"] = more
        _add_addresses(answer, graph, costs, layout)
    return answer


def _smallest_budget(
    graph: Graph, costs: Costs, unconstrained: int, options: argparse.Namespace, on_progress: Progress | None
) -> Found:
    """The planner's answer for the smallest budget that it meets, and the proven lower bound of all budgets."""
    began = time.perf_counter()
    schedule = lowest_schedule(graph, costs, options.planner, options.seed, on_progress)
    bound = peak_lower_bound(graph, costs)
    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    least, seconds = result.peak_bytes, time.perf_counter() - began
    gap = 100 * (least / bound - 1) if bound else 0.0
    overhead = overhead_percent(result.time_ns, plain_time_ns(graph, costs))
    summary = {
        "status": "optimal" if least <= bound else "feasible",
        "minimum_bytes": least,
        "lower_bound_bytes": bound,
        "gap_percent": gap,
        "time_ns": result.time_ns,
        "overhead_percent": overhead,
        "planner": options.planner,
        "unconstrained_peak_bytes": unconstrained,
        "solve_seconds": round(seconds, 6),
    }
    facts = {
        "budget": f"{exact_bytes(least)}, {format_percent(least / max(unconstrained, 1))} of the peak",
        "bound": f"{exact_bytes(bound)}: no schedule has a lower peak",
        "gap": f"{gap:.3f} %",
        "overhead": f"{overhead:.3f} % at that budget",
    }
    heading = f"smallest budget reached by {options.planner} in {seconds:.2f} s"
    return Found(schedule, summary, heading, facts)

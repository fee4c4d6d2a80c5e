"""How much memory plans take up, with addresses and without: ``python -m benchmarks.placement``.

For the graphs of ``benchmarks/graphs`` at several budgets, planned by ``auto{effort=1}``: bytes reserved over the simulated
peak, by our placement and, in the model of it, by PyTorch's allocator for CUDA. With ``--minimalloc FOLDER``, MiniMalloc's
hard instances (``NAME.CAPACITY.csv``) by several seeds, within their capacity.
Writes ``placement.json`` and ``placement.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from lowtide.budget import parse_budget
from lowtide.ir import keep_all_schedule, load_instance, simulate
from lowtide.place import cuda_memory, lay_out, place, read_buffers, solve_placed
from lowtide.solve import Problem
from lowtide.store import write_atomically
from lowtide.units import overhead_percent

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GRAPHS = "gpt2_2,gpt2_12,gpt2_24,gpt2_48,t5,swin,unet,resnet50"
PLANNER = "auto{effort=1}"
SEEDS = range(5)
LIMIT_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default=GRAPHS)
    parser.add_argument("--budgets", default="100%,70%,50%,30%")
    parser.add_argument("--minimalloc", type=Path, help="the folder of MiniMalloc's instances")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "processor": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "plans": [],
        "instances": [],
    }
    for name in options.graphs.split(","):
        for budget in options.budgets.split(","):
            results["plans"].append(plan_row(name, budget))
            print(results["plans"][-1], flush=True)
    for path in sorted(options.minimalloc.glob("*.csv")) if options.minimalloc else ():
        results["instances"].append(instance_row(path))
        print(results["instances"][-1], flush=True)
    write_atomically(RESULTS / "placement.json", json.dumps(results, indent=1) + "\n")
    write_atomically(RESULTS / "placement.md", document(results))


def plan_row(name: str, budget: str) -> dict[str, Any]:
    graph, costs = load_instance(HERE / "graphs" / f"{name}.json")
    whole = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    problem = Problem(graph, costs, parse_budget(budget, whole))
    placed = solve_placed(problem, PLANNER)
    counted = placed.counted
    if counted.schedule is None or placed.layout is None:
        return {"graph": name, "budget": budget, "buffers": None}
    began = time.perf_counter()
    layout = lay_out(graph, costs, counted.schedule)
    seconds = time.perf_counter() - began
    native, expandable = (cuda_memory(graph, costs, counted.schedule, expandable_segments=e) for e in (False, True))
    return {
        "graph": name,
        "budget": budget,
        "buffers": len(layout.placement.offsets),
        "peak_bytes": counted.peak_bytes,
        "reserved_bytes": layout.reserved_bytes,
        "lower_bound_bytes": layout.placement.lower_bound_bytes + graph.fixed_bytes,
        "seconds": round(seconds, 2),
        "overhead_percent": overhead_percent(counted.time_ns, costs.total_time_ns),
        "placed_overhead_percent": overhead_percent(placed.solution.time_ns, costs.total_time_ns),
        "within_budget": placed.layout.reserved_bytes <= problem.budget_bytes,
        "native": dataclasses.asdict(native),
        "expandable": dataclasses.asdict(expandable),
    }


def instance_row(path: Path) -> dict[str, Any]:
    """Of a file called after its capacity."""
    name, capacity, _ = path.name.split(".")
    _, buffers, _ = read_buffers(path)
    found = [
        place(buffers, int(capacity), seed=seed, seconds=LIMIT_SECONDS, most_visits=float("inf")) for seed in SEEDS
    ]
    return {
        "name": name,
        "buffers": len(buffers),
        "capacity_bytes": int(capacity),
        "load_bytes": buffers.load_bytes,
        "placed": sum(one.status.solved for one in found),
        "seconds": [round(one.seconds, 2) for one in found],
    }


def document(results: dict[str, Any]) -> str:
    lines = [
        "# Placement",
        "",
        "`python -m benchmarks.placement`: the bytes that the addresses of a plan take up over its simulated peak, and the",
        "seconds that placing took. The bound is the proven one, over the peak too: offsets are multiples of 64 bytes, so that",
        f"it may lie above 1. Plans are by `{PLANNER}` at budgets in percent of the peak without recomputation.",
        "",
        f"- processor: {results['processor']}",
        f"- load at the start: {results['load']}",
        "",
        "The last columns: the overhead in percent with the budget on counted bytes, and on the bytes of the addresses.",
        "",
        "| graph | budget | buffers | reserved / peak | bound / peak | seconds | overhead | on addresses |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results["plans"]:
        if row["buffers"] is None:
            lines.append(f"| {row['graph']} | {row['budget']} | no plan | | | | | |")
            continue
        ratio, bound = (row[key] / row["peak_bytes"] for key in ("reserved_bytes", "lower_bound_bytes"))
        placed = f"{row['placed_overhead_percent']:.3f}" if row["within_budget"] else "over the budget"
        cells = (
            *(row[key] for key in ("graph", "budget", "buffers")),
            *(f"{ratio:.6f}", f"{bound:.6f}", f"{row['seconds']:.2f}", f"{row['overhead_percent']:.3f}", placed),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += allocator_table(results["plans"])
    if results["instances"]:
        lines += [
            "",
            "## MiniMalloc's hard instances",
            "",
            f"Seconds until a placement within the capacity was found, by {len(SEEDS)} seeds, {LIMIT_SECONDS:.0f} s at most.",
            "",
            "| instance | buffers | load / capacity | placed | seconds |",
            "|---|---:|---:|---:|---:|",
        ]
    for row in results["instances"]:
        seconds = ", ".join(f"{each:.2f}" for each in row["seconds"])
        load = row["load_bytes"] / row["capacity_bytes"]
        lines.append(f"| {row['name']} | {row['buffers']} | {load:.4f} | {row['placed']} of {len(SEEDS)} | {seconds} |")
    return "\n".join(lines) + "\n"


def allocator_table(rows: list[dict[str, Any]]) -> list[str]:
    """What the same plans take without addresses."""
    lines = [
        "",
        "## Without addresses",
        "",
        "The same plans under a model of PyTorch's allocator for CUDA (`lowtide.place.cuda_memory`), over the peak: what it",
        "reserves where the device has room, and the smallest device on which it does not run out of memory, with native and",
        "with expandable segments; the last column is our placement again.",
        "",
        "| graph | budget | native reserved | smallest device | expandable reserved | smallest device | placed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (row for row in rows if row["buffers"] is not None):
        taken = [
            row[kind][key] for kind in ("native", "expandable") for key in ("reserved_bytes", "smallest_device_bytes")
        ]
        ratios = [f"{bytes_ / row['peak_bytes']:.3f}" for bytes_ in (*taken, row["reserved_bytes"])]
        lines.append(f"| {' | '.join([row['graph'], row['budget'], *ratios])} |")
    return lines


if __name__ == "__main__":
    main()

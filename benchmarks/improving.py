"""How good the plan in force is while the search goes on: ``python -m benchmarks.improving``.

For the graphs of ``benchmarks/graphs``, as ``rematerialize`` does it but without training beside it: the first plan, the plan
in force two seconds after planning began, and the one at the end, from an empty plan cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

from lowtide.ir import graph_from_json, keep_all_schedule, simulate
from lowtide.pipeline import FIRST_PLANNER
from lowtide.planning import Plan
from lowtide.planning.background import BackgroundSearch
from lowtide.planning.cache import PlanRequest

GRAPHS = Path(__file__).parent / "graphs"
RESULTS = Path(__file__).parent / "results" / "improving.md"
SOON_SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="gpt2_12,gpt2_24,gpt2_48,t5,swin,unet,resnet50")
    parser.add_argument("--budgets", default="30,50,70", help="in percent of the peak without recomputation")
    options = parser.parse_args()
    os.environ["LOWTIDE_PLAN_CACHE"] = "0"
    lines = [
        "# Plans that get better",
        "",
        f"Made by `python -m benchmarks.improving`, load at the start {os.getloadavg()[0]:.1f}. Overheads in %.",
        "",
        f"| graph | budget | first plan | after s | in force at {SOON_SECONDS:.0f} s | at the end | after s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in options.graphs.split(","):
        for percent in map(int, options.budgets.split(",")):
            lines.append(row(name, percent))
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


def row(name: str, percent: int) -> str:
    graph, costs = graph_from_json(json.loads((GRAPHS / f"{name}.json").read_text()))
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    request = PlanRequest(graph, costs, peak * percent // 100, "auto", 0)
    began = time.monotonic()
    first = dataclasses.replace(request, planner=FIRST_PLANNER).make().begun()
    made = time.monotonic() - began
    search: BackgroundSearch[Plan] = BackgroundSearch(request, first, lambda plan: plan)
    search.wait(max(SOON_SECONDS - made, 0.0))
    soon = search.take() or first
    search.wait()
    last = search.take() or soon
    total = time.monotonic() - began
    overheads = [f"{100 * plan.overhead:.2f}" for plan in (first, soon, last)]
    return f"| {name} | {percent} % | {overheads[0]} | {made:.2f} | {overheads[1]} | {overheads[2]} | {total:.1f} |"


if __name__ == "__main__":
    main()

"""What a second memory is worth: ``python -m benchmarks.offload --speedup 100``; the table of ``results/offload.md`` by
``--graphs all --budgets 40 --effort 0 --speedup 100``.

For graphs of ``benchmarks/graphs`` and generated chains, budgets in percent of the peak, and links that carry as much both
ways: the overhead, in percent of the program's time, of ``auto`` and ``rotor`` without the link, of ``offload``, ``pofo`` and
``auto`` with it, and what no schedule with it undercuts. A table in Markdown; the exit code is 1 where ``auto`` with the link
is above another planner, which it promises not to be with an effort of 1 or more.

The graphs were measured on a CPU, next to which no link is slow: ``--speedup`` divides their times. The generated chains, in
which each operator takes its own time and bytes as in the paper of ``pofo``, are scaled so that a link of 16 GB/s carries all
that is computed in the time in which it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.chains import CHAINS
from lowtide.ir import Costs, Graph, SecondMemory, keep_all_schedule, load_instance, simulate
from lowtide.solve import Problem, Solution, solve
from lowtide.solve.moving.bound import moving_bound
from lowtide.solve.outcome import least_time_ns
from lowtide.units import overhead_percent

GRAPHS = "gpt2_12,t5,unet,resnet50,swin"
ALL = "conv_77,gpt2_2,gpt2_12,gpt2_24,gpt2_48,resnet50,swin,t5,unet"
COLUMNS = ("graph", "operators", "budget", "link", "auto alone", "rotor", "offload", "pofo", "auto", "bound", "seconds")
_EQUAL_RATE = 16e9  # bytes per second at which a chain's results take as long as its operators
_NONE = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    rows, above = [], []
    for name in (ALL if options.graphs == "all" else options.graphs).split(","):
        graph, costs = load(name, options.speedup)
        least = simulate(graph, costs, keep_all_schedule(graph))
        for percent in options.budgets.split(","):
            budget = int(least.peak_bytes * float(percent) / 100)
            alone = [
                solve(Problem(graph, costs, budget), planner)
                for planner in (f"auto{{effort={options.effort}}}", "rotor")
            ]
            for rate in options.rates.split(","):
                link = SecondMemory(int(float(rate) * 1e9), int(float(rate) * 1e9))
                linked = replace(costs, second_memory=link)
                moving = _with(graph, linked, budget, options.effort)
                found = [*alone, *moving]
                cells = [_overhead(one, least.time_ns) for one in found]
                bound = overhead_percent(_bound(graph, linked, budget, moving[-1]), least.time_ns)
                seconds = f"{moving[-1].solve_seconds:.0f}"
                rows.append(
                    (name, str(len(graph.ops)), f"{percent} %", f"{rate} GB/s", *cells, f"{bound:.2f}", seconds)
                )
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
                times = [one.time_ns for one in found if one.schedule is not None]
                if times and (moving[-1].schedule is None or moving[-1].time_ns > min(times)):
                    above.append(rows[-1])
    for line in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(line)} |")
    for row in above:
        print(f"auto is above another planner: {' '.join(row)}", file=sys.stderr)
    return 1 if above else 0


def load(name: str, speedup: float) -> tuple[Graph, Costs]:
    """A graph of the folder with its times divided, or a generated chain."""
    if name in CHAINS:
        graph, costs = CHAINS[name]()
        scale = float(costs.storage_bytes.sum()) / _EQUAL_RATE * 1e9 / float(costs.time_ns.sum())
    else:
        graph, costs = load_instance(Path(__file__).parent / "graphs" / f"{name}.json")
        scale = 1 / speedup
    return graph, replace(costs, time_ns=np.ceil(costs.time_ns * scale).astype(np.int64))


def _with(graph: Graph, costs: Costs, budget: int, effort: int) -> list[Solution]:
    planners = (f"offload{{effort={effort}}}", "pofo", f"auto{{effort={effort}}}")
    return [solve(Problem(graph, costs, budget), planner) for planner in planners]


def _bound(graph: Graph, costs: Costs, budget: int, solution: Solution) -> int:
    """Nanoseconds that no schedule undercuts; with no effort, plans come without."""
    problem = Problem(graph, costs, budget)
    return max(least_time_ns(problem), solution.lower_bound_ns or 0, moving_bound(problem, 1, solution.time_ns or None))


def _overhead(solution: Solution, least_ns: int) -> str:
    return _NONE if solution.schedule is None else f"{overhead_percent(solution.time_ns, least_ns):.2f}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--graphs", default=GRAPHS, help=f"names of graphs and of chains ({', '.join(CHAINS)}), or all")
    parser.add_argument("--budgets", default="20,30,50", help="percent of the peak (default: %(default)s)")
    parser.add_argument("--rates", default="1,4,16,64", help="GB per second (default: %(default)s)")
    parser.add_argument("--effort", type=int, default=3, help="of auto and offload (default: %(default)s)")
    parser.add_argument("--speedup", type=float, default=1.0, help="how much quicker a device is (default: 1)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

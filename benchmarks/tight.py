"""How far plans are from proven bounds where the budget is just above the least one: ``python -m benchmarks.tight``.

``auto`` on generated chains (``benchmarks.chains``) and on the graphs of ``benchmarks/graphs``, at 1.01, 1.02 and 1.05 times
the least budget known of each (that of ``minimum_peak`` when it was first asked for, kept in the results so that every run is
asked the same). With ``--published``, at the budgets of published results instead, where the instances are present.

A run has a ``--label`` and is a column of the table (*before* and *after*: without and with many cuts and strict runs);
cells that the label has already are kept unless ``--again`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.chains import CHAINS
from benchmarks.planners import PUBLISHED
from lowtide.ir import Costs, Graph, load_instance
from lowtide.solve import Problem, minimum_peak, solve
from lowtide.store import write_atomically

HERE = Path(__file__).parent
GRAPHS = ("gpt2_2", "resnet50", "unet", "swin", "gpt2_12", "t5", "gpt2_24")
FACTORS = ("1.01", "1.02", "1.05")
_HEAD = """# Budgets near the least one

`python -m benchmarks.tight`: plans of `auto` at 1.01, 1.02 and 1.05 times the least budget known of each graph. A cell is the
overhead in %, the proven lower bound on the overhead of any plan, the points between the two, and seconds of wall time (on two
shared cores, so that times differ by what else ran).
"""
_PUBLISHED_HEAD = """
## Published results

The same on published instances, at the budgets of their published results: the overhead and the bound of Checkmate's program
after up to 24 hours of Gurobi, and ours.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="the column of the table (default: %(default)s)")
    parser.add_argument("--graphs", default=",".join((*CHAINS, *GRAPHS)), help="names with commas between them")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--published", action="store_true", help="the published instances instead")
    parser.add_argument("--again", action="store_true", help="run anew what the label has")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = options.results / "tight.json"
    data: dict[str, Any] = {"least": {}, "published": {}, "runs": {}}
    data |= json.loads(path.read_text()) if path.exists() else {}
    cells = data["runs"].setdefault(options.label, {})
    for name, key, graph, costs, budget in _published(data) if options.published else _generated(options.graphs, data):
        place = f"{name} {key}"
        if place not in cells or options.again:
            cells[place] = _cell(graph, costs, budget, options.planner)
            print(place, cells[place], flush=True)
            write_atomically(path, json.dumps(data, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), page(data))


def _generated(names: str, data: dict[str, Any]) -> Any:
    for name in names.split(","):
        graph, costs = CHAINS[name]() if name in CHAINS else load_instance(HERE / "graphs" / f"{name}.json")
        if name not in data["least"]:
            data["least"][name] = minimum_peak(graph, costs)[0]
        for factor in FACTORS:
            yield name, factor, graph, costs, int(data["least"][name] * float(factor))


def _published(data: dict[str, Any]) -> Any:
    """The instances with published results, which are noted in ``data``."""
    for name, reference in json.loads((PUBLISHED / "reference_gurobi.json").read_text()).items():
        graph, costs = load_instance(PUBLISHED / f"{name}.json")
        for row in reference["gurobi"]:
            key = str(row["budget_bytes"])
            data["published"][f"{name} {key}"] = [row["overhead_percent"], row["lower_bound_percent"]]
            yield name, key, graph, costs, row["budget_bytes"]


def _cell(graph: Graph, costs: Costs, budget_bytes: int, planner: str) -> dict[str, Any]:
    """Overhead and bound in percent of the program's time (``None``: no plan, no bound) and seconds."""
    began = time.perf_counter()
    solution = solve(Problem(graph, costs, budget_bytes), planner)
    seconds = round(time.perf_counter() - began, 1)
    whole = int(costs.time_ns.sum())
    overhead = None if solution.schedule is None else round(100 * (solution.time_ns / whole - 1), 3)
    bound = None if solution.lower_bound_ns is None else round(100 * (solution.lower_bound_ns / whole - 1), 3)
    return {"status": solution.status.value, "overhead": overhead, "bound": bound, "seconds": seconds}


def page(data: dict[str, Any]) -> str:
    """The Markdown page of all runs."""
    lines, labels = [_HEAD], list(data["runs"])
    for published in (False, True):
        places = dict.fromkeys(place for cells in data["runs"].values() for place in cells)
        rows = [place for place in places if (place in data["published"]) == published]
        if not rows:
            continue
        lines += [_PUBLISHED_HEAD] if published else []
        extra = " | Gurobi" if published else ""
        lines += [
            f"| graph | budget{extra} | {' | '.join(labels)} |",
            "|---|---" + "|---" * (len(labels) + published) + "|",
        ]
        for place in rows:
            texts = [_text(data["runs"][label].get(place), 3 if published else 2) for label in labels]
            known = [_reference(*data["published"][place])] if published else []
            lines.append(f"| {' | '.join([*place.split(), *known, *texts])} |")
    return "\n".join(lines) + "\n"


def _reference(overhead: float | None, bound: float | None) -> str:
    return "none" if overhead is None else f"{overhead:.3f}, bound {bound:.3f}"


def _text(cell: dict[str, Any] | None, digits: int) -> str:
    if cell is None:
        return ""
    if cell["overhead"] is None:
        return f"{cell['status']}, {cell['seconds']} s"
    overhead, bound = cell["overhead"], cell["bound"] or 0.0
    shown, proven, gap = (f"{number:.{digits}f}" for number in (overhead, bound, overhead - bound))
    return f"{shown}, bound {proven}, gap {gap}, {cell['seconds']} s"


if __name__ == "__main__":
    main()

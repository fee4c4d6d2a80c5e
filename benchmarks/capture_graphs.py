"""Capture the graphs of ``benchmarks/graphs``: ``python -m benchmarks.capture_graphs --graphs all``.

Every model of ``benchmarks.graph_models`` is captured by lowtide, its operators are measured on this CPU with one thread
(each distinct call once, into a cost cache of this run's own, so that nothing measured under other conditions gets in), and
graph and costs are written as compact ``lowtide-graph/1``, see ``capture_graph``. The machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.graph_models import GRAPH_MODELS
from lowtide.capture import capture
from lowtide.ir import Costs, Graph, graph_to_json, keep_all_schedule, simulate
from lowtide.pipeline import program_costs
from lowtide.store import write_atomically

GRAPHS = Path(__file__).parent / "graphs"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture_graphs", description=__doc__)
    parser.add_argument("--graphs", default="all", help='"all" or names with commas between them')
    parser.add_argument("--output", type=Path, default=GRAPHS, help="folder (default: benchmarks/graphs)")
    parser.add_argument("--costs", type=Path, help="folder of a cost cache to use (default: an empty one)")
    options = parser.parse_args(arguments)
    names = list(GRAPH_MODELS) if options.graphs == "all" else options.graphs.split(",")
    unknown = [name for name in names if name not in GRAPH_MODELS]
    if unknown:
        print(f"unknown graphs: {', '.join(unknown)}; known: {', '.join(GRAPH_MODELS)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE_DIR"] = str(options.costs or folder)
        for name in names:
            _write(name, options.output / f"{name}.json")
    return 0


def _write(name: str, path: Path) -> None:
    began = time.perf_counter()
    graph, costs = capture_graph(name)
    write_atomically(path, compact_text(graph, costs))
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    print(
        f"{name}: {len(graph.ops)} ops, peak {peak / 2**20:.0f} MiB, step {costs.total_time_ns / 1e9:.2f} s, "
        f"file {path.stat().st_size / 1e3:.0f} kB, made in {time.perf_counter() - began:.0f} s "
        f"(at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB so far)",
        flush=True,
    )


def capture_graph(name: str) -> tuple[Graph, Costs]:
    """Graph and measured costs, without types and shapes of values, and without source lines, which name folders of this
    machine."""
    model, args, kwargs = GRAPH_MODELS[name]()
    with torch.enable_grad():
        program = capture(model, args, kwargs).program
    ops = tuple(dataclasses.replace(op, source="") for op in program.graph.ops)
    values = tuple(dataclasses.replace(value, dtype="", shape=()) for value in program.graph.values)
    return dataclasses.replace(program.graph, name=name, ops=ops, values=values), program_costs(program)


def compact_text(graph: Graph, costs: Costs) -> str:
    """``lowtide-graph/1`` without spaces and defaults, broken into lines at ops and values."""
    data = graph_to_json(graph, costs, compact=True)
    return json.dumps(data, separators=(",", ":")).replace("},{", "},\n{") + "\n"


if __name__ == "__main__":
    sys.exit(main())

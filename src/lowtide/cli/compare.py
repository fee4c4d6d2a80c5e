"""``lowtide compare FILE...``: compare planners on graphs from files; needs neither a model nor torch.

Percentages in ``--budgets`` are of the peak without recomputation; plain numbers are bytes. If a planner fails, its
cell says so and the others go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from lowtide.budget import parse_budget
from lowtide.cli.options import add_second_memory_options, seed, with_second_memory
from lowtide.errors import PlanError
from lowtide.extras import require
from lowtide.ir import load_instance
from lowtide.progress import progress_bar
from lowtide.report.comparison import (
    LEGEND,
    Cell,
    Instance,
    Task,
    comparison_figure,
    comparison_to_json,
    render_comparison,
    run_cell,
    run_limited,
)
from lowtide.solve import get_planner, planner_names
from lowtide.store import write_atomically

_LONGEST = 1_000_000  # seconds
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_OF_HIGHSPY = ("checkmate", "checkmate-approx")  # planners that need highspy


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a lowtide-dag, a lowtide-graph or a saved plan")
    add("--budgets", required=True, metavar="LIST", help='"70%%,50%%,30%%" of the peak, or "8GiB,4GiB"')
    add("--planners", metavar="LIST", help='for instance "auto,chen-sqrt" (default: all)')
    add("--time-limit", type=float, metavar="SECONDS", help="per cell, each then in its own process")
    add("--seed", type=seed, default=0, help="seed of the planners (default: 0)")
    add_second_memory_options(parser)
    add("--json", metavar="OUT.json", help="write the table as lowtide-comparison/1")
    add("--plot", metavar="DIR_OR_FILE", help="plot overhead against budget, a file per instance")


def run(options: argparse.Namespace) -> int:
    planners, limit = _planners(options.planners), options.time_limit
    if limit is not None and not 0 < limit <= _LONGEST:
        raise PlanError(
            f"--time-limit is {limit:g} seconds, but must be above 0 and at most {_LONGEST}; for instance 60"
        )
    loaded = {path: load_instance(path) for path in options.files}
    graphs = {path: (graph, with_second_memory(costs, options)) for path, (graph, costs) in loaded.items()}
    stems = [Path(path).stem for path in graphs]
    names = {path: Path(path).stem if stems.count(Path(path).stem) == 1 else path for path in graphs}
    instances = {path: Instance.of(names[path], *graphs[path]) for path in graphs}
    targets = _plot_targets(options.plot, list(instances.values()))
    tasks = []
    budgets = [text.strip() for text in options.budgets.split(",")]
    for path, text, planner in itertools.product(graphs, budgets, planners):
        budget = parse_budget(text, instances[path].peak_bytes)
        tasks.append((path, Task(names[path], planner, text, budget, options.seed, graphs[path][1].second_memory)))
    cells = []
    with progress_bar() as on_progress:
        for index, (path, task) in enumerate(tasks):
            if on_progress is not None:
                on_progress(f"{task.instance}: {task.planner} at {task.budget}", index / len(tasks))
            cells.append(run_cell(*graphs[path], task) if limit is None else run_limited(path, task, limit))
    for instance in instances.values():
        print(render_comparison(instance, cells), end="\n\n")
    print(LEGEND)
    if options.json:
        write_atomically(Path(options.json), json.dumps(comparison_to_json(instances.values(), cells), indent=1) + "\n")
    for instance, target in targets:
        _plot(instance, cells, target)
    return 0


def _planners(text: str | None) -> list[str]:
    """Planner specs, each checked. By default all planners whose optional dependencies are installed."""
    if text is None:
        if find_spec("highspy") is not None:
            return list(planner_names())
        print(f"left out: {', '.join(_OF_HIGHSPY)} (highspy: pip install 'lowtide[ilp]')", file=sys.stderr)
        return [name for name in planner_names() if name not in _OF_HIGHSPY]
    outside_braces = re.split(r",(?![^{]*\})", text)
    specs = list(dict.fromkeys(filter(None, (part.strip() for part in outside_braces))))
    if not specs:
        raise PlanError("--planners names no planner; write for instance auto,chen-sqrt")
    for spec in specs:
        get_planner(spec)
    return specs


def _plot_targets(plot: str | None, instances: list[Instance]) -> list[tuple[Instance, Path]]:
    """The file for each instance's figure. Raises before anything runs if there is a problem."""
    if plot is None:
        return []
    require("matplotlib")
    path = Path(plot)
    if path.suffix not in _PLOT_SUFFIXES:
        return [(instance, path / f"{Path(instance.name).stem}.png") for instance in instances]
    if len(instances) > 1:
        raise PlanError(f"--plot {plot} is one file for {len(instances)} instances; name a folder instead.")
    return [(instances[0], path)]


def _plot(instance: Instance, cells: list[Cell], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        comparison_figure(instance, cells).savefig(target, dpi=150)
    except OSError as error:
        raise PlanError(f"cannot write {target}: {error.strerror or error}.") from error
    print(f"plot written to {target}", file=sys.stderr)

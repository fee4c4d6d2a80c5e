"""``lowtide compare FILE...``: planners side by side on graphs from files; needs neither a model nor torch.

Percentages of ``--budgets`` refer to the peak without recomputation. A planner that fails is a cell of the table, never
the end of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

from lowtide.budget import parse_budget
from lowtide.cli.options import Subparsers, seed
from lowtide.cli.progress import Progress, progress_bar
from lowtide.errors import PlanError
from lowtide.extras import MissingExtraError, require
from lowtide.ir import Costs, Graph, keep_all_schedule, load_instance, simulate
from lowtide.report.comparison import (
    LEGEND,
    Cell,
    Instance,
    Task,
    comparison_to_json,
    render_comparison,
    run_cell,
)
from lowtide.report.comparison_figure import comparison_figure
from lowtide.report.limited import run_limited
from lowtide.solve import get_planner, planner_names
from lowtide.store import write_atomically

_LONGEST = 1_000_000  # seconds
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_NEEDED_MODULES = {"checkmate": "highspy", "checkmate-approx": "highspy"}  # by planner, where optional


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("compare", help="compare planners on graphs from files", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="lowtide-dag/1, lowtide-graph/1 or a saved plan")
    parser.add_argument("--budgets", required=True, metavar="LIST", help='for instance "70%%,50%%,30%%" or "8GiB,4GiB"')
    parser.add_argument("--planners", metavar="LIST", help='for instance "auto,chen-sqrt" (default: all)')
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="per cell, each then in its own process")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the planners (default: 0)")
    parser.add_argument("--json", metavar="OUT.json", help="write the table as lowtide-comparison/1")
    parser.add_argument("--plot", metavar="DIR_OR_FILE", help="plot overhead against budget, a file per instance")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    planners = _planners(options.planners)
    if options.time_limit is not None and not 0 < options.time_limit <= _LONGEST:
        raise PlanError(
            f"--time-limit is {options.time_limit:g} seconds, but must be above 0 and at most {_LONGEST}; for instance 60"
        )
    graphs = {path: load_instance(path) for path in options.files}
    instances = _instances(graphs)
    targets = _plot_targets(options.plot, list(instances.values()))
    tasks = _tasks(instances, options.budgets, planners, options.seed)
    with progress_bar() as on_progress:
        cells = _cells(graphs, tasks, options.time_limit, on_progress)
    for instance in instances.values():
        print(render_comparison(instance, cells), end="\n\n")
    print(LEGEND)
    if options.json:
        write_atomically(Path(options.json), json.dumps(comparison_to_json(instances.values(), cells), indent=1) + "\n")
    for instance, target in targets:
        _plot(instance, cells, target)
    return 0


def _planners(text: str | None) -> list[str]:
    """Specs, each checked. Without any, all of the registry whose optional dependencies are installed."""
    if text is None:
        missing = [name for name in planner_names() if _lacks_module(name)]
        if missing:
            needed = ", ".join(sorted({_NEEDED_MODULES[name] for name in missing}))
            print(f"left out: {', '.join(missing)} ({needed}: pip install 'lowtide[ilp]')", file=sys.stderr)
        return [name for name in planner_names() if name not in missing]
    specs = list(dict.fromkeys(filter(None, _split(text))))
    if not specs:
        raise PlanError("--planners names no planner; write for instance auto,chen-sqrt")
    for spec in specs:
        get_planner(spec)
    return specs


def _lacks_module(planner: str) -> bool:
    try:
        if planner in _NEEDED_MODULES:
            require(_NEEDED_MODULES[planner])
    except MissingExtraError:
        return True
    return False


def _split(text: str) -> list[str]:
    """At the commas outside braces."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _instances(graphs: dict[str, tuple[Graph, Costs]]) -> dict[str, Instance]:
    """By path; names are the files' stems, or the paths where two stems are alike."""
    stems = [Path(path).stem for path in graphs]
    found = {}
    for path, (graph, costs) in graphs.items():
        name = Path(path).stem if stems.count(Path(path).stem) == 1 else path
        plain = simulate(graph, costs, keep_all_schedule(graph))
        found[path] = Instance(name, len(graph.ops), plain.peak_bytes, plain.time_ns)
    return found


def _tasks(instances: dict[str, Instance], budgets: str, planners: list[str], seed: int) -> list[tuple[str, Task]]:
    found = []
    for (path, instance), text, planner in itertools.product(instances.items(), budgets.split(","), planners):
        budget = parse_budget(text.strip(), instance.peak_bytes)
        found.append((path, Task(instance.name, planner, text.strip(), budget, seed)))
    return found


def _cells(
    graphs: dict[str, tuple[Graph, Costs]],
    tasks: list[tuple[str, Task]],
    limit_seconds: float | None,
    on_progress: Progress | None,
) -> list[Cell]:
    cells = []
    for index, (path, task) in enumerate(tasks):
        if on_progress is not None:
            on_progress(f"{task.instance}: {task.planner} at {task.budget}", index / len(tasks))
        if limit_seconds is None:
            cells.append(run_cell(*graphs[path], task))
        else:
            cells.append(run_limited(path, task, limit_seconds))
    return cells


def _plot_targets(plot: str | None, instances: list[Instance]) -> list[tuple[Instance, Path]]:
    """Where each instance's figure goes. Raises before anything runs where that cannot be."""
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

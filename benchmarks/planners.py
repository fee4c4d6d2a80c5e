"""Every planner at every budget on every committed graph: ``python -m benchmarks.planners --jobs 2``.

Each cell runs in a process of its own under a time limit. Finished cells are kept in ``planners.json`` under the results
folder, so that an interrupted run goes on where it was; ``--again`` runs the chosen cells anew. After every cell
``planners.json`` and ``planners.md`` are written; at the end the plots, and what the claims of
``benchmarks.planner_claims`` are broken by. The exit code is 1 where one is.

``--add FOLDER`` takes over those of the chosen cells that another run left in its results folder: parts of the table can be run
apart and at the same time.

"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner_claims import violations
from benchmarks.planner_table import document
from lowtide import __version__
from lowtide.budget import parse_budget
from lowtide.errors import PlanError
from lowtide.ir import load_instance
from lowtide.report.comparison import (
    OVER_TIME,
    Cell,
    Instance,
    Task,
    cell_text,
    comparison_figure,
    comparison_to_json,
    run_limited,
)
from lowtide.solve import get_planner, planner_names
from lowtide.store import write_atomically

HERE = Path(__file__).parent
PUBLISHED = Path(os.environ.get("LOWTIDE_INSTANCES", HERE.parents[1] / "shared" / "instances"))
BUDGETS = "70%,50%,30%,20%,10%"
_PACKAGES = ("numpy", "highspy", "scipy")
Key = tuple[str, str, str]


class Results:
    """The cells so far, and the files that they live in."""

    def __init__(self, folder: Path, paths: dict[str, Path]) -> None:
        self.folder = folder
        self.path = folder / "planners.json"
        self.instances = {name: Instance.of(name, *load_instance(path)) for name, path in paths.items()}
        self.cells: dict[Key, Cell] = {}
        self.notes: dict[str, Any] = {}
        if self.path.exists():
            data = json.loads(self.path.read_text())
            self.notes = data["notes"]
            self.cells = {_key(cell): cell for cell in (Cell(**row) for row in data["cells"])}
            self.instances = {row["name"]: Instance(**row) for row in data["instances"]} | self.instances

    def lacks(self, task: Task, limit_seconds: float) -> bool:
        """Not run yet, or on another version of the graph, or ended by a shorter limit."""
        cell = self.cells.get(_key(task))
        if cell is None or cell.budget_bytes != task.budget_bytes:
            return True
        return cell.status == OVER_TIME and (cell.seconds or 0.0) < limit_seconds

    def add(self, cell: Cell) -> None:
        self.cells[_key(cell)] = cell
        self.write()

    def take(self, folder: Path, tasks: Iterable[Task]) -> None:
        """The answers to the tasks in another results folder, where it has them."""
        data = json.loads((folder / self.path.name).read_text())
        theirs = {_key(cell): cell for cell in (Cell(**row) for row in data["cells"])}
        for task in tasks:
            cell = theirs.get(_key(task))
            if cell is not None and cell.budget_bytes == task.budget_bytes:
                self.cells[_key(cell)] = cell

    def write(self) -> None:
        cells = list(self.cells.values())
        data = comparison_to_json(self.instances.values(), cells) | {"notes": self.notes}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(data, indent=1) + "\n")
        page = document(self.instances.values(), cells, violations(cells), self.notes)
        write_atomically(self.path.with_suffix(".md"), page)

    def plot(self, names: Sequence[str]) -> None:
        folder = self.folder / "planners"
        folder.mkdir(exist_ok=True)
        for name in names:
            figure = comparison_figure(self.instances[name], list(self.cells.values()))
            figure.savefig(folder / f"{name}.png", dpi=110)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _key(place: Cell | Task) -> Key:
    return place.instance, place.planner, place.budget


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = graph_paths(options.graphs)
    planners = planner_names() if options.planners == "all" else options.planners.split(",")
    try:
        for planner in planners:
            get_planner(planner)  # an unknown one is an error now
    except PlanError as error:
        raise SystemExit(str(error)) from None
    results = Results(options.results, paths)
    results.notes |= environment(options)
    asked = list(_tasks(results, paths, planners, options))
    for folder in options.add:
        results.take(folder, asked)
    chosen = [task for task in asked if options.again or results.lacks(task, options.time_limit)]
    _run(results, paths, chosen, options)
    results.write()
    results.plot(list(paths))
    broken = violations([cell for cell in results.cells.values() if cell.instance in paths])
    for line in broken:
        print(f"BROKEN {line}", file=sys.stderr)
    return 1 if broken else 0


def graph_paths(graphs: str) -> dict[str, Path]:
    """Committed graphs and published instances by name, the smallest first; ``graphs`` chooses among them."""
    known = {path.stem: path for path in (HERE / "graphs").glob("*.json")}
    for path in sorted(PUBLISHED.glob("*.json")):
        try:
            load_instance(path)
        except PlanError:
            continue  # a file of reference figures
        known.setdefault(path.stem, path)
    names = list(known) if graphs == "all" else graphs.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown graphs: {', '.join(unknown)}; known: {', '.join(known)}")
    return {name: known[name] for name in sorted(names, key=lambda name: known[name].stat().st_size)}


def _tasks(
    results: Results, paths: dict[str, Path], planners: Sequence[str], options: argparse.Namespace
) -> Iterator[Task]:
    for name, budget, planner in itertools.product(paths, options.budgets.split(","), planners):
        budget_bytes = parse_budget(budget, results.instances[name].peak_bytes)
        yield Task(name, planner, budget, budget_bytes, options.seed)


def _run(results: Results, paths: dict[str, Path], tasks: Sequence[Task], options: argparse.Namespace) -> None:
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(run_limited, paths[q.instance], q, options.time_limit) for q in tasks]
        try:
            for count, done in enumerate(concurrent.futures.as_completed(pending), 1):
                cell = done.result()
                results.add(cell)
                place = f"{cell.instance} {cell.budget} {cell.planner}"
                print(f"{count}/{len(pending)} {place}: {cell_text(cell)} {cell.message}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Hardware, versions and settings of the latest run."""
    versions = {"python": platform.python_version(), "lowtide": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "settings": f"{options.jobs} cells at a time, at most {options.time_limit:g} s each, seed {options.seed}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners", description=__doc__)
    parser.add_argument("--graphs", default="all", help='"all" or names with commas between them')
    parser.add_argument("--planners", default="all", help='"all" or names with commas between them')
    parser.add_argument("--budgets", default=BUDGETS, help="percentages of the peak (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=180.0, metavar="SECONDS", help="per cell (default: 180)")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="cells at a time (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="run the chosen cells anew")
    parser.add_argument(
        "--add", type=Path, action="append", default=[], metavar="FOLDER", help="take over another run's cells first"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

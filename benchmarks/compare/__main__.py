"""``python -m benchmarks.compare``: lowtide beside everything that a user would pick instead.

Every (model, mechanism) runs in a process of its own (``benchmarks.compare.worker``), its settings and plain eager in turn.
``lowtide`` and ``lowtide-inductor`` run last, at ``--budgets`` and at every peak that another mechanism of their kind, eager or
compiled, measured on the model. Results are added to ``compare.json`` (``compare-cuda.json`` on a GPU) as they come, so that a
run can be done in parts; the Markdown table and the plots are made anew from all of them. ``--dry-run`` prints what would run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.compare.figure import save_figures
from benchmarks.compare.mechanisms import MATCHING, MECHANISMS, RIVALS
from benchmarks.compare.models import COMPARED, LARGE, SMALL
from benchmarks.compare.report import document
from benchmarks.compare.worker import Row
from lowtide.device import find

RESULTS = Path(__file__).parents[1] / "results"
BUDGETS = "70%,50%,30%"
_SIMILAR = 0.02  # peaks closer than this part of each other are one budget


@dataclass(frozen=True, slots=True)
class Run:
    """One process: a model, a mechanism and its settings."""

    model: str
    mechanism: str
    settings: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    models = _chosen("models", options.models, COMPARED, SMALL if options.device == "cpu" else LARGE)
    mechanisms = _chosen("mechanisms", options.mechanisms, MECHANISMS, MECHANISMS)
    rows = read_rows(options.results / f"{_name(options.device)}.json")
    ordered = sorted(mechanisms, key=lambda name: name in MATCHING)
    for model in models:
        for mechanism in ordered:
            run = Run(model, mechanism, settings_of(model, mechanism, options.budgets.split(","), rows))
            command = worker_command(run, options)
            print(" ".join(command[1:]), flush=True)
            if options.dry_run:
                continue
            found = _measured(run, command, options)
            rows = [row for row in rows if (row.model, row.mechanism) != (model, mechanism)] + found
            write(options.results, rows, options)
            for row in found:
                print(f"  {row.setting or '-':>12}  {row.message or _figures(row)}", flush=True)
    return 0


def settings_of(model: str, mechanism: str, budgets: Sequence[str], rows: Sequence[Row]) -> tuple[str, ...]:
    """What ``mechanism`` runs with: its own settings, the budgets, or the budgets and the peaks that others measured."""
    chosen = MECHANISMS[mechanism]
    if not chosen.budgeted:
        return chosen.settings
    return (*budgets, *_peaks(model, mechanism, rows)) if mechanism in MATCHING else tuple(budgets)


def _peaks(model: str, mechanism: str, rows: Sequence[Row]) -> Iterator[str]:
    """The peaks of the other mechanisms of the kind, those that are alike once, as the lowest of them."""
    kind = MECHANISMS[mechanism].compiled
    peaks = sorted(
        row.peak_bytes
        for row in rows
        if row.model == model and not row.message
        and row.mechanism in RIVALS and MECHANISMS[row.mechanism].compiled == kind
    )  # fmt: skip
    last = 0
    for peak in peaks:
        if peak > (1 + _SIMILAR) * last:
            last = peak
            yield str(peak)


def worker_command(run: Run, options: argparse.Namespace) -> list[str]:
    flags = [f"--{name}={getattr(options, name)}" for name in ("rounds", "batch", "threads", "device", "planner")]
    return [sys.executable, "-m", "benchmarks.compare.worker", *flags, run.model, run.mechanism, *run.settings]


def _measured(run: Run, command: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """The worker's rows; where the process fails or takes too long, rows that say so."""
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": str(options.threads)}
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=options.time_limit,
            check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return [Row(**row) for row in json.loads(done.stdout.strip().split("\n")[-1])]
        message = f"exit code {done.returncode}: {done.stderr.strip().split(chr(10))[-1][:300]}"
    except subprocess.TimeoutExpired:
        message = f"not done after {options.time_limit} s"
    return [Row(run.model, run.mechanism, setting, message=message) for setting in run.settings]


def _figures(row: Row) -> str:
    return f"peak {row.peak_ratio:.3f}  time {row.time_ratio:.2f}  gradient error {row.gradient_error:.1e}"


def read_rows(path: Path) -> list[Row]:
    """The rows of earlier runs."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def write(results: Path, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """The data, the tables, and a plot per model."""
    results.mkdir(parents=True, exist_ok=True)
    name = _name(options.device)
    setting = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": options.device if options.device == "cpu" else find(options.device).name(),
        "threads": options.threads,
        "rounds": options.rounds,
        "planner": options.planner,
        "load": round(os.getloadavg()[0], 1),
    }
    data = {"setting": setting, "rows": [dataclasses.asdict(row) for row in rows]}
    (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (results / f"{name}.md").write_text(document(rows, setting))
    save_figures(rows, results / name)


def _name(device: str) -> str:
    """Of what is written; the peaks of one device are no budgets on another."""
    return "compare" if device == "cpu" else f"compare-{device.split(':')[0]}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--models", default="all", help=f'"all" (those for the device) or some of {",".join(COMPARED)}')
    parser.add_argument("--mechanisms", default="all", help=f'"all" or some of {",".join(MECHANISMS)}')
    parser.add_argument("--budgets", default=BUDGETS, help="of lowtide's mechanisms, in percent of plain eager's peak")
    parser.add_argument("--planner", default="auto", help="of lowtide and lowtide-inductor")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each setting (default: 7)")
    parser.add_argument("--batch", type=int, default=0, help="samples per step (default: each model's own)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or another accelerator')
    parser.add_argument("--time-limit", type=int, default=3600, help="seconds per process (default: 3600)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser.parse_args(arguments)


def _chosen(what: str, text: str, known: Collection[str], usual: Iterable[str]) -> list[str]:
    names = list(usual) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what}: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

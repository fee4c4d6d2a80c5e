"""The model sweep: ``python -m benchmarks.sweep --models all --budgets 70%,50%,40%,30%``.

Every model runs in a fresh process (``benchmarks.sweep_model``); its rows are written to ``sweep/NAME.json`` under the results
folder and ``sweep.md`` there is made anew from all files present. The exit code is 1 where a row breaks what a plan promises,
see ``problems``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.models import MODELS
from benchmarks.sweep_model import ITERATIONS, TIMINGS, Row, sweep_model
from benchmarks.sweep_table import table

RESULTS = Path(__file__).parent / "results"
BUDGETS = "70%,50%,40%,30%"
CLOSENESS = 0.01
CLOSENESS_BYTES = 256 * 1024
DIFFERENCE_FROM_EAGER = 1e-5

# Models that can only be captured decomposed: the captured program without recomputation is their reference. None is.
DECOMPOSED: frozenset[str] = frozenset()


def problems(row: Row) -> list[str]:
    """What a row breaks of what a plan promises; empty for a good row."""
    if row.status == "capture":
        return [f"not captured: {row.message}"]
    if row.status == "infeasible":
        good = row.minimum_bytes > row.budget_bytes
        return [] if good else [f"the minimum {row.minimum_bytes:,} is not above the refused {row.budget_bytes:,}"]
    found = []
    if row.measured_peak_bytes > row.budget_bytes:
        found.append(f"measured peak {row.measured_peak_bytes:,} above the budget {row.budget_bytes:,}")
    if row.measured_peak_bytes > row.predicted_peak_bytes:
        found.append(f"measured peak {row.measured_peak_bytes:,} above the predicted {row.predicted_peak_bytes:,}")
    slack = max(CLOSENESS_BYTES, CLOSENESS * row.predicted_peak_bytes)
    if row.measured_peak_bytes < row.predicted_peak_bytes - slack:
        found.append(f"measured peak {row.measured_peak_bytes:,} far below the predicted {row.predicted_peak_bytes:,}")
    if row.difference_from_program != 0.0:
        found.append(f"differs from the program without recomputation by {row.difference_from_program:.2g}")
    if not row.equal and (row.model not in DECOMPOSED or row.difference > DIFFERENCE_FROM_EAGER):
        found.append(f"differs from eager by {row.difference:.2g}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = list(MODELS) if options.models == "all" else options.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        sys.stderr.write(f"unknown models: {', '.join(unknown)}; known: {', '.join(MODELS)}\n")
        return 2
    if options.inside:
        torch.set_num_threads(options.threads)
        settings = options.planner, options.iterations, options.timings, options.device
        rows = sweep_model(names[0], options.budgets.split(","), *settings)
        _write(Path(options.inside), json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return 0
    bad = 0
    for name in names:
        bad += sum(map(_report, run_in_fresh_process(name, options)))
        _write(options.results / "sweep.md", _document(options.results))
    return 1 if bad else 0


def run_in_fresh_process(name: str, options: argparse.Namespace) -> list[Row]:
    """Sweep one model in a process of its own and read its rows."""
    target = options.results / "sweep" / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.sweep", "--models", name, "--inside", str(target)]
    for option in ("budgets", "planner", "iterations", "timings", "threads", "device"):
        command += [f"--{option}", str(getattr(options, option))]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the sweep of {name} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return [Row(**row) for row in json.loads(target.read_text())]


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options for ``run_in_fresh_process``."""
    return _options(arguments)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--models", default="all", help='"all" or names with commas between them')
    parser.add_argument("--budgets", default=BUDGETS, help="percentages of the unconstrained peak")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="compared training iterations")
    parser.add_argument("--timings", type=int, default=TIMINGS, help="timed steps per model, interleaved")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or another accelerator')
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _report(row: Row) -> bool:
    """Say how a row went; true where it breaks something."""
    found = problems(row)
    good = f"overhead {100 * row.overhead_predicted:.1f} %" if row.status == "ok" else row.status
    outcome = "; ".join(found) or good
    sys.stdout.write(f"{'FAIL' if found else 'good'} {row.model} {row.asked}: {outcome}\n")
    sys.stdout.flush()
    return bool(found)


def _document(results: Path) -> str:
    rows = [Row(**row) for name in MODELS for row in _rows_of(results / "sweep" / f"{name}.json")]
    planners = ", ".join(sorted({row.planner for row in rows if row.planner}))
    setting = (
        f"planner {planners}; torch {torch.__version__}, {platform.machine()}, float32, training mode, dropout as "
        "published; step times are medians of few steps and noisy"
    )
    return table(rows, {id(row): problems(row) for row in rows}, setting)


def _rows_of(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text()) if path.exists() else []


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text if text.endswith("\n") else text + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())

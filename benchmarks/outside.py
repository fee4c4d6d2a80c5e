"""Models of other packages, with lowtide's default settings: ``python -m benchmarks.outside --path FOLDER``.

``FOLDER`` has the packages of ``outside_requirements.txt`` (``pip install --no-deps --target FOLDER -r ...``). Each model is
trained for some steps with SGD, plainly and with lowtide's default settings at ``--budget`` of the peak, in turns and from the
same generators, in a process of its own. ``outcome``: "good" where losses, gradients, buffers and generators were equal to the
bit in every step, and the peak within the budget; see ``outside_run.Row``. ``peak`` is the highest of the last nine steps and
``time`` their median, as shares of the plain ones' side by side; ``predicted`` the share that the plans say; ``first`` the
seconds until the first step has ended. Times of steps are of their one thread alone, so that other work on the machine does not
count. A budget that cannot be met is tried again at the smallest one that the error names. ``results/outside.json`` and
``outside.md`` have a row per model; the exit code is 1 where one is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.outside_models import OUTSIDE
from benchmarks.outside_run import Row, row_of

RESULTS = Path(__file__).parent / "results"
_SECONDS = 180
_KEPT: list[torch.library.Library] = []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--path", default="", help="folder with the packages")
    parser.add_argument("--models", default="", help="names with commas between them (default: all)")
    parser.add_argument("--packages", default="", help="only models of these packages")
    parser.add_argument("--budget", default="45%")
    parser.add_argument("--steps", type=int, default=4, help="before those that are timed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        sys.path.append(options.path)
        _declare_missing_operators()
        warnings.simplefilter("ignore")
        print("\n" + json.dumps(dataclasses.asdict(row_of(options.models, options.budget, options.steps))), flush=True)
        os._exit(0)  # whatever the packages leave running
    path = options.results / "outside.json"
    known = {row["model"]: Row(**row) for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    rows = []
    for name in _chosen(options):
        rows.append(_measured(name, options))
        print(line_of(rows[-1]), flush=True)
        known[name] = rows[-1]
        _write(path, [known[each] for each in OUTSIDE if each in known], options)
    return 1 if any(row.outcome == "broken" for row in rows) else 0


def _chosen(options: argparse.Namespace) -> list[str]:
    packages = options.packages.split(",") if options.packages else []
    names = options.models.split(",") if options.models else list(OUTSIDE)
    return [name for name in names if not packages or OUTSIDE[name].package in packages]


def _declare_missing_operators() -> None:
    """Of wheels for other builds of PyTorch (torchvision, torchaudio), which cannot be imported without them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    sound = torch.library.Library("_torchaudio", "FRAGMENT")
    for name, kind, value in (("cuda_version", "int?", None), ("is_align_available", "bool", False)):
        sound.define(f"{name}() -> {kind}")
        sound.impl(name, lambda value=value: value, "CompositeExplicitAutograd")
    loops = torch.library.Library("torchaudio", "FRAGMENT")
    for name in ("_lfilter_core_loop", "_overdrive_core_loop"):
        loops.define(f"{name}(Tensor x) -> ()")  # nothing here calls them
    _KEPT.extend((library, sound, loops))
    load = torch.ops.load_library

    def load_where_it_can_be(path: str) -> None:
        with contextlib.suppress(OSError) if "torchaudio" in str(path) else contextlib.nullcontext():
            load(path)

    torch.ops.load_library = load_where_it_can_be


def _measured(name: str, options: argparse.Namespace) -> Row:
    command = [sys.executable, "-m", "benchmarks.outside", "--inside", "--models", name, "--path", options.path]
    command += ["--budget", options.budget, "--steps", str(options.steps)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    package = OUTSIDE[name].package
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, package, "unfinished", options.budget, message=f"took more than {_SECONDS} s")
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"model"')), "")
    if line:
        return Row(**json.loads(line))
    return Row(name, package, "broken", options.budget, message=f"{done.returncode}: {done.stderr.strip()[-200:]}")


def line_of(row: Row) -> str:
    """A row of the table."""
    parts = str(row.parts) if row.parts >= 0 else "whole"
    numbers = f"{row.plain_peak_bytes / 2**20:.1f} | {row.peak:.2f} | {row.time:.2f} | {row.predicted:.2f}"
    times = f"{row.plain_step_ms:.0f} | {row.first:.1f}"
    budget = row.budget
    if budget.isdigit() and row.plain_peak_bytes:
        budget = f"{int(budget) / row.plain_peak_bytes:.0%} (smallest)"
    message = row.message.replace("|", "/").replace("\n", " ")
    return f"| {row.model} | {row.package} | {row.outcome} | {budget} | {parts} | {numbers} | {times} | {message} |"


def _write(path: Path, rows: Sequence[Row], options: argparse.Namespace) -> None:
    settings = {"budget": options.budget, "steps": options.steps, "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"settings": settings, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n"
    )
    path.with_suffix(".md").write_text("\n".join(_document(rows, options.budget)) + "\n")


def _document(rows: Sequence[Row], budget: str) -> list[str]:
    built = [row for row in rows if row.outcome != "not built"]
    counts = Counter(row.outcome for row in built)
    told = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    met = [row for row in built if row.outcome == "good" and row.budget == budget]
    lines = [
        "# Models of other packages", "",
        f"`python -m benchmarks.outside --path FOLDER --budget {budget}`: its first lines tell what the columns are. "
        "Rows stay until they are measured anew.",
        "*smallest*: the smallest that the error named where that could not be met, as a share of the plain peak.",
        "", f"{len(built)} models of {len({row.package for row in built})} packages: {told}.",
    ]  # fmt: skip
    if met:
        time = statistics.median(row.time for row in met)
        predicted = statistics.median(row.predicted for row in met)
        lines.append(
            f"Of the {len(met)} that are good at {budget}, the median step takes {time:.2f} of the plain one's time, and "
            f"{predicted:.2f} by prediction."
        )
    return [
        *lines, "",
        "| model | package | outcome | budget | parts | plain peak, MiB | peak | time | predicted | plain, ms | first, s | |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
        *map(line_of, rows),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

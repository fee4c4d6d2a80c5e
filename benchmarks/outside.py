"""Models of other packages that are no single program, run in parts: ``python -m benchmarks.outside --path FOLDER``.

``FOLDER`` has the packages of ``outside_requirements.txt`` (``pip install --no-deps --target FOLDER -r ...``). Each model is
trained for some steps with SGD, plainly and with lowtide's default settings at ``--budget`` of the peak, in turns and from the
same generators. ``equal``: whether losses, gradients, buffers and the generator were equal to the bit in every step.
``peak`` is the highest of the last three steps and ``time`` their median, as shares of the plain ones' side by side;
``first`` the seconds until the first step has ended. An infeasible budget is tried again at the smallest one that the
error names.
``results/outside.json`` and ``outside.md`` have a row per model; the exit code is 1 where one is not equal.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import lowtide
from benchmarks.outcomes import error_text
from benchmarks.outside_models import OUTSIDE
from benchmarks.zoo import Sample, loss_of

RESULTS = Path(__file__).parent / "results"
_SECONDS = 900
_TIMED = 3
_KEPT: list[torch.library.Library] = []


@dataclass(frozen=True, slots=True)
class Row:
    """One model; see the module. ``budget`` as asked for, or in bytes where that could not be met. ``parts``: how many ran
    by plans, 0 for a model that is planned as a whole."""

    model: str
    budget: str
    equal: bool = False
    parts: int = 0
    plain_peak_bytes: int = 0
    peak: float = 0.0
    time: float = 0.0
    first: float = 0.0
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--path", default="", help="folder with the packages")
    parser.add_argument("--models", default=",".join(OUTSIDE))
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        sys.path.append(options.path)
        _declare_missing_operators()
        warnings.simplefilter("ignore")
        print(json.dumps(dataclasses.asdict(_row(options.models, options.budget, options.steps))), flush=True)
        os._exit(0)  # whatever the packages leave running
    path = RESULTS / "outside.json"
    known = {row["model"]: Row(**row) for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    rows = []
    for name in options.models.split(","):
        rows.append(_measured(name, options))
        print(rows[-1], flush=True)
        known[name] = rows[-1]
        _write(path, [known[each] for each in OUTSIDE if each in known], options)
    return 0 if all(row.equal for row in rows) else 1


def _declare_missing_operators() -> None:
    """Of torchvision's wheel for other builds of PyTorch, which cannot be imported without them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    _KEPT.append(library)


def _measured(name: str, options: argparse.Namespace) -> Row:
    command = [sys.executable, "-m", "benchmarks.outside", "--inside", "--models", name, "--path", options.path]
    command += ["--budget", options.budget, "--steps", str(options.steps)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, options.budget, message=f"took more than {_SECONDS} s")
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), "")
    return Row(**json.loads(line)) if line else Row(name, options.budget, message=done.stderr.strip()[-200:])


def _row(name: str, budget: int | str, steps: int) -> Row:
    sample = OUTSIDE[name]()
    try:
        return _trained(name, sample, budget, steps)
    except lowtide.InfeasibleBudgetError as error:
        if isinstance(budget, int):
            return Row(name, str(budget), message=error_text(error, 200))
        return _row(name, error.minimum_bytes * 101 // 100, steps)
    except Exception as error:  # noqa: BLE001 (a failure is a result)
        return Row(name, str(budget), message=error_text(error, 200))


def _trained(name: str, sample: Sample, budget: int | str, steps: int) -> Row:
    plain, args, kwargs = sample
    plain.zero_grad()
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, args, kwargs, budget=budget)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-3) for each in (plain, model)]
    equal, plain_peaks, peaks, ratios, first = True, [], [], [], 0.0
    for number in range(steps + _TIMED):
        state = torch.get_rng_state()
        plain_peak, plain_seconds, expected = _step(plain, sample)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        peak, seconds, loss = _step(model, sample)
        same = torch.equal(loss, expected) and torch.equal(after, torch.get_rng_state()) and _alike(model, plain)
        equal, first = equal and same, first or seconds
        if number >= steps:
            plain_peaks.append(plain_peak)
            peaks.append(peak)
            ratios.append(seconds / plain_seconds)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parts = model.forward.parts
    count = len(parts.planned()) if parts else 0
    plain_peak = max(plain_peaks)
    share = round(max(peaks) / plain_peak, 3)
    return Row(name, str(budget), equal, count, plain_peak, share, round(statistics.median(ratios), 2), round(first, 1))


def _step(model: nn.Module, sample: Sample) -> tuple[int, float, torch.Tensor]:
    losses: list[torch.Tensor] = []

    def run() -> None:
        loss = loss_of(_scalar(model(*sample[1], **sample[2])))
        loss.backward()
        losses.append(loss.detach())

    began = time.perf_counter()
    peak = lowtide.measure(run).peak_bytes
    return peak, time.perf_counter() - began, losses[0]


def _scalar(result: object) -> object:
    if isinstance(result, torch.Tensor) and result.numel() > 1:
        return result.float().square().mean()
    return result


def _alike(first: nn.Module, second: nn.Module) -> bool:
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    gradients = all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs
    )
    return gradients and all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))


def _write(path: Path, rows: Sequence[Row], options: argparse.Namespace) -> None:
    settings = {"budget": options.budget, "steps": options.steps, "torch": torch.__version__}
    path.write_text(
        json.dumps({"settings": settings, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n"
    )
    lines = [
        "# Models of other packages, in parts", "",
        f"`python -m benchmarks.outside --path FOLDER --budget {options.budget}`: its first lines tell what the columns are. A",
        "budget in bytes is the smallest one that the error named, where the one asked for could not be met.", "",
        "| model | budget | equal | parts | plain peak, MiB | peak | time | first step, s | |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for row in rows:
        numbers = f"{row.plain_peak_bytes / 2**20:.1f} | {row.peak:.2f} | {row.time:.2f} | {row.first:.1f}"
        parts = str(row.parts) if row.parts else "whole"
        lines.append(
            f"| {row.model} | {row.budget} | {'yes' if row.equal else 'no'} | {parts} | {numbers} | {row.message} |"
        )
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())

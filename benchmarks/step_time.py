"""Step time of the demo's GPT-2: plain eager, lowtide at 100 % and lowtide at 50 % of the unconstrained peak.

``python -m benchmarks.step_time`` takes a forward and backward pass with each of the three in turn, many times over, and
compares medians. Two claims are checked (exit code 1 where one fails):

- at 100 % the pass takes no more than 3 % longer than plain eager;
- the measured overhead of 50 % over 100 % is no more than 3 percentage points above the predicted one.

Every run is added to ``step_time.json`` and ``step_time.md`` under the results folder, whatever it shows. The machine should
be otherwise idle: the spread of the plain passes is written beside the medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import lowtide
from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus

RESULTS = Path(__file__).parent / "results"
MOST_OVER_EAGER = 0.03
MOST_OVER_PREDICTED = 0.03
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Result:
    """Medians in nanoseconds; overheads as fractions. ``spread`` is the interquartile range of the plain passes over
    their median."""

    rounds: int
    threads: int
    torch_version: str
    machine: str
    eager_ns: int
    full_ns: int
    half_ns: int
    spread: float
    predicted_overhead: float
    solve_seconds: float
    budget_bytes: int
    unconstrained_peak_bytes: int

    @property
    def full_over_eager(self) -> float:
        return self.full_ns / self.eager_ns - 1

    @property
    def half_over_full(self) -> float:
        return self.half_ns / self.full_ns - 1

    def broken(self) -> list[str]:
        """The claims that do not hold."""
        found = []
        if self.full_over_eager > MOST_OVER_EAGER:
            found.append(f"100 % takes {100 * self.full_over_eager:.1f} % more than plain eager")
        if self.half_over_full > self.predicted_overhead + MOST_OVER_PREDICTED:
            found.append(f"50 % takes {100 * self.half_over_full:.1f} % more than 100 %, far over the prediction")
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="timed passes with each of the three (default: 21)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: as PyTorch chooses")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = run(Shape(), options.rounds)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "step_time.json"
    results = [*earlier(path), result]
    path.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    path.with_suffix(".md").write_text(document(results))
    print(document(results))
    for complaint in result.broken():
        print(complaint, file=sys.stderr)
    return 1 if result.broken() else 0


def run(shape: Shape, rounds: int) -> Result:
    """Plan both budgets, then time the three models in turn."""
    eager = build_model(shape)
    (batch,) = draw_batches(load_corpus(), shape, 1)
    sample = {"input_ids": batch, "labels": batch}
    full, half = (
        lowtide.rematerialize(copy.deepcopy(eager), (), sample, budget=budget, planning="wait")
        for budget in ("100%", "50%")
    )
    (plan,) = lowtide.plans(half)
    times = interleaved([eager, full, half], batch, rounds)
    quartiles = statistics.quantiles(times[0], n=4)
    eager_ns, full_ns, half_ns = (int(statistics.median(taken)) for taken in times)
    return Result(
        rounds=rounds,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        machine=platform.machine(),
        eager_ns=eager_ns,
        full_ns=full_ns,
        half_ns=half_ns,
        spread=(quartiles[2] - quartiles[0]) / eager_ns,
        predicted_overhead=plan.overhead,
        solve_seconds=plan.solve_seconds,
        budget_bytes=plan.budget_bytes,
        unconstrained_peak_bytes=plan.unconstrained_peak_bytes,
    )


def interleaved(models: Sequence[nn.Module], batch: torch.Tensor, rounds: int) -> list[list[int]]:
    """Times of ``rounds`` passes per model, taken in turn, the order rotated from round to round."""
    times: list[list[int]] = [[] for _ in models]
    for index in range(-_WARM_UPS, rounds):
        for offset in range(len(models)):
            which = (index + offset) % len(models)
            taken = timed_pass(models[which], batch)
            if index >= 0:
                times[which].append(taken)
    return times


def timed_pass(model: nn.Module, batch: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter_ns()
    model(input_ids=batch, labels=batch).loss.backward()
    return time.perf_counter_ns() - start


def document(results: Sequence[Result]) -> str:
    """Every run so far as Markdown, the latest last."""
    lines = [
        "# Step time",
        "",
        "`python -m benchmarks.step_time`: the GPT-2 of `lowtide demo` (6 layers, width 256, context 256, batch 4, dropout",
        "0.1), forward and backward, plain eager, lowtide at 100 % and at 50 % of the unconstrained peak, taken in turn.",
        "Every run is kept, the latest last. The spread is the interquartile range of the plain passes over their median:",
        "where it is large, the machine was busy and the run says little.",
        "",
        "| rounds | threads | torch | spread | plain | 100 % | 50 % | 100 / plain | 50 / 100 % | predicted | claims |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *map(_row, results)]) + "\n"


def _row(result: Result) -> str:
    medians = [f"{taken / 1e6:.1f} ms" for taken in (result.eager_ns, result.full_ns, result.half_ns)]
    ratios = (result.full_over_eager, result.half_over_full, result.predicted_overhead)
    cells = [str(result.rounds), str(result.threads), result.torch_version, f"{100 * result.spread:.1f} %", *medians]
    cells += [f"{100 * ratio:.1f} %" for ratio in ratios]
    return f"| {' | '.join([*cells, '; '.join(result.broken()) or 'hold'])} |"


def earlier(path: Path) -> list[Result]:
    """The runs that a results file holds."""
    return [Result(**record) for record in json.loads(path.read_text())] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())

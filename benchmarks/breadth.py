"""Every architecture of ``transformers`` that can be made small: ``python -m benchmarks.breadth``.

Each is trained for two steps plainly, twice, and for two steps under lowtide at ``--budget`` of its peak, with every
compiler asked for: losses, gradients, parameters, buffers and the generator must be equal to the bit (compiled: gradients
close, or about as close as plain PyTorch's own are to those in double precision), the measured peak within the prediction
and the budget. Models that plain PyTorch does not run, or not twice alike, are counted apart. ``breadth.json`` under the
results folder gets a row per model and compiler, ``breadth.md`` what is to be told of them. The exit code is 1 where a row
is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import lowtide
from benchmarks.breadth_models import architectures, build
from benchmarks.outcomes import CLOSE, error_text, gradient_error
from benchmarks.sweep_model import SEED, State, difference_of, measured_peak, train
from benchmarks.zoo import Sample, in_precision
from lowtide.integrations.passes import latest_plans

RESULTS = Path(__file__).parent / "results"
OUTCOMES = ("good", "broken", "refused", "not repeatable", "not built")
ITERATIONS = 2
_KINKS = 2  # compiled gradients may be so many times further from eager's than eager's own rounding takes them
_SILENT_SECONDS = 600
_END_SECONDS = 60  # for a process that has said its last word
_MESSAGE = 240


@dataclass(frozen=True, slots=True)
class Row:
    """One model with one compiler. ``outcome``: see ``OUTCOMES``; ``message`` says why it is not good. Bytes.

    ``difference``: 0 where everything is equal to the bit, else the largest relative one. ``seconds``: planning and running.
    """

    model: str
    compiler: str
    outcome: str
    message: str = ""
    ops: int = 0
    eager_peak_bytes: int = 0
    budget_bytes: int = 0
    predicted_peak_bytes: int = 0
    measured_peak_bytes: int = 0
    overhead: float = 0.0
    difference: float = 0.0
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.inside:
        _work(options.models.split(","), options.compilers.split(","), options)
        return 0
    path = options.results / "breadth.json"
    known = [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    broken = 0
    for row in _rows(_chosen(options), options):
        print(f"{row.outcome:>14}  {row.model} {row.compiler}  {row.message}", flush=True)
        broken += row.outcome == "broken"
        known = [other for other in known if not _replaced(other, row)] + [row]
        _write(path, known, options)
    return 1 if broken else 0


def _replaced(old: Row, new: Row) -> bool:
    """A model that did not come to be compiled has one row for all compilers."""
    return old.model == new.model and (old.compiler == new.compiler or not (old.compiler and new.compiler))


def _chosen(options: argparse.Namespace) -> list[str]:
    names = architectures()
    if options.models:
        return [name for name in names if name in options.models.split(",")]
    tasks = options.tasks.split(",") if options.tasks else []
    return [name for name in names if not tasks or name.partition("/")[0] in tasks]


def _rows(names: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """Rows as they come, from a process that is started anew where it dies or falls silent."""
    left = list(names)
    while left:
        with _started(left, options) as process:
            assert process.stdout is not None
            for line in _lines(process.stdout):
                if line.startswith("{"):
                    row = Row(**json.loads(line))
                    yield row
                    left = left[left.index(row.model) :]
                elif line.startswith("done "):
                    left = left[left.index(line[5:]) + 1 :]
            try:
                why = f"the process ended with exit code {process.wait(_END_SECONDS)}"
            except subprocess.TimeoutExpired:
                process.kill()
                why = f"nothing for {_SILENT_SECONDS} s"
        if left:
            yield Row(left.pop(0), options.compilers, "broken", why)


def _started(names: Sequence[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.breadth", "--inside", "--models", ",".join(names)]
    for option in ("compilers", "budget", "planner"):
        command += [f"--{option}", getattr(options, option)]
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Until the stream ends or is silent for too long."""
    rest = b""
    while select.select([stream], [], [], _SILENT_SECONDS)[0]:
        chunk = os.read(stream.fileno(), 1 << 16)
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        yield from map(bytes.decode, whole)


def _work(names: Sequence[str], compilers: Sequence[str], options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        for row in _rows_of(name, compilers, options):
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        print(f"done {name}", flush=True)


def _rows_of(name: str, compilers: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    try:
        plain = build(name)
        expected, again = train(plain, ITERATIONS), train(build(name), ITERATIONS)
        peak = measured_peak(plain)
    except Exception as error:  # noqa: BLE001 (whatever the library says of this configuration)
        yield Row(name, "", "not built", error_text(error, _MESSAGE))
        return
    if difference_of(again, expected):
        yield Row(name, "", "not repeatable", "two plain runs from the same state differ")
        return
    for compiler in compilers:
        began = time.perf_counter()
        try:
            row = _row(name, compiler, peak, expected, options)
        except lowtide.CaptureError as error:
            row = Row(name, compiler, "refused", error_text(error, _MESSAGE))
        except Exception as error:  # noqa: BLE001 (a failure of lowtide is a result)
            row = Row(name, compiler, "broken", error_text(error, _MESSAGE))
        yield dataclasses.replace(row, seconds=time.perf_counter() - began)


def _row(name: str, compiler: str, peak: int, expected: State, options: argparse.Namespace) -> Row:
    sample = _planned(name, options.budget, compiler, options)
    found = train(sample, ITERATIONS)
    measured = measured_peak(sample)
    (plan,) = latest_plans(sample[0])
    if compiler == "eager":
        difference, most = difference_of(found, expected), 0.0
    else:
        difference, most = gradient_error(_gradients(found[0]), _gradients(expected[0])), CLOSE
        if CLOSE < difference < math.inf:
            most = max(CLOSE, _KINKS * _rounding(name, expected[0]))
    complaints = [
        f"differs from eager by {difference:.1e}" * (not difference <= most),
        f"measured peak {measured:,} above the predicted {plan.peak_bytes:,}" * (measured > plan.peak_bytes),
        f"predicted peak {plan.peak_bytes:,} above the budget {plan.budget_bytes:,}"
        * (plan.peak_bytes > plan.budget_bytes),
    ]
    message = "; ".join(filter(None, complaints))
    return Row(
        name, compiler, "broken" if message else "good", message, len(plan.graph.ops), peak, plan.budget_bytes,
        plan.peak_bytes, measured, plan.overhead, difference,
    )  # fmt: skip


def _planned(name: str, budget: int | str, compiler: str, options: argparse.Namespace) -> Sample:
    """Within the budget, or else the smallest that the error names."""
    model, args, kwargs = build(name)
    try:
        lowtide.rematerialize(
            model,
            args,
            kwargs,
            budget=budget,
            planner=options.planner,
            compiler=compiler,
            planning="wait",
            on_capture_error="error",
        )
    except lowtide.InfeasibleBudgetError as error:
        return _planned(name, error.minimum_bytes, compiler, options)
    return model, args, kwargs


def _rounding(name: str, expected: dict[str, Any]) -> float:
    """How far rounding alone takes plain PyTorch's gradients from those in double precision.

    Far where ReLU and batch norm over few elements decide by a last bit. Where the model draws random numbers, double
    precision draws others: how far last bits of the parameters take them, then.
    """
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    (state,) = train(in_precision(build(name), torch.float64), 1)
    if not torch.equal(state["generator"], before):
        (state,) = train(_nudged(build(name)), 1)
    return gradient_error({key: tensor.float() for key, tensor in _gradients(state).items()}, _gradients(expected))


def _nudged(sample: Sample) -> Sample:
    """With parameters that differ in their last bits."""
    draws = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in sample[0].parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn(parameter.shape, generator=draws))
    return sample


def _gradients(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("gradient") and tensor is not None}


def _write(path: Path, rows: Sequence[Row], options: argparse.Namespace) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    setting = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "budget": options.budget,
        "planner": options.planner,
    }
    ordered = sorted(rows, key=lambda row: (architectures().index(row.model), row.compiler))
    data = {"setting": setting, "rows": [dataclasses.asdict(row) for row in ordered]}
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text(document(ordered, setting))


def document(rows: Sequence[Row], setting: dict[str, str]) -> str:
    """Counts by task, and every row that is not good."""
    facts = ", ".join(f"{key} {value}" for key, value in setting.items())
    lines = ["# Breadth", "", f"Made by `python -m benchmarks.breadth`; {facts}.", ""]
    lines += [
        "Every model type of `transformers` that has a class for the task, made small. *good*: equal to plain PyTorch to the",
        f"bit (compiled: every gradient within {CLOSE:g}, or within {_KINKS} times what rounding takes plain PyTorch's own",
        "from double precision), measured peak within prediction and budget. *refused*: a `CaptureError` says why. *not",
        "built*: plain PyTorch does not run the shrunk configuration. *not repeatable*: two plain runs differ.",
        "",
        "| task | compiler | " + " | ".join(OUTCOMES) + " |",
        "|---|---|" + "---:|" * len(OUTCOMES),
    ]
    groups = dict.fromkeys((row.model.partition("/")[0], row.compiler) for row in rows)
    for task, compiler in groups:
        counts = [
            sum((row.model.partition("/")[0], row.compiler, row.outcome) == (task, compiler, outcome) for row in rows)
            for outcome in OUTCOMES
        ]
        lines.append(f"| {task} | {compiler} | {' | '.join(str(count or '') for count in counts)} |")
    lines += ["", "| model | compiler | outcome | why |", "|---|---|---|---|"]
    told = [row for row in rows if row.outcome in ("broken", "refused", "not repeatable")]
    lines += [f"| {row.model} | {row.compiler} | {row.outcome} | {row.message.replace('|', '/')} |" for row in told]
    return "\n".join([*lines, ""])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breadth", description=__doc__)
    parser.add_argument("--tasks", default="", help="some of causal, masked, seq2seq, .. (default: all)")
    parser.add_argument("--models", default="", help="names like causal/llama, with commas between them")
    parser.add_argument("--compilers", default="eager", help='"eager", "inductor" or "eager,inductor"')
    parser.add_argument("--budget", default="50%", help="of the peak without recomputation (default: 50%%)")
    parser.add_argument("--planner", default="auto{effort=1}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

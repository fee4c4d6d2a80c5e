"""``python -m benchmarks.gpu``, or ``make gpu``: all that needs an accelerator, in one command.

The tests marked ``gpu``, a small sweep of the model zoo, the comparison with other mechanisms at real sizes, and the demo, each
in a process of its own; one that fails does not keep the others. Results go to ``results/accelerators/NAME``, the name of the
device as its maker has it: ``README.md`` there says what ran, on what, and how it ended. The exit code is 1 where anything
failed, and 2, with one line, where PyTorch finds no accelerator.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.device import Accelerator, accelerators
from lowtide.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "accelerators"
SWEPT = "gpt2,llama,t5,resnet,vit,unet2d"
STEPS = ("tests", "sweep", "compare", "demo")


@dataclass(frozen=True, slots=True)
class Done:
    """How a step ended, and after how long."""

    step: str
    command: str
    exit_code: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = next(iter(accelerators()), None)
    if device is None:
        sys.stderr.write(
            f"no accelerator: PyTorch {torch.__version__} finds none on this machine (torch.accelerator.is_available() is "
            "False). Install a build of PyTorch for the device and its driver.\n"
        )
        return 2
    folder = options.results / folder_name(device.name())
    commands = commands_of(str(device.device), folder)
    chosen = options.steps.split(",")
    unknown = [step for step in chosen if step not in commands]
    if unknown:
        sys.stderr.write(f"unknown steps: {', '.join(unknown)}; known: {', '.join(STEPS)}\n")
        return 2
    if options.dry_run:
        sys.stdout.writelines(f"{' '.join(commands[step])}\n" for step in chosen)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for step in chosen:
        done.append(_run(step, commands[step], folder))
        (folder / "README.md").write_text(document(device, done))
    return 1 if any(each.exit_code for each in done) else 0


def folder_name(name: str) -> str:
    """Of a device: ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commands_of(device: str, folder: Path) -> dict[str, list[str]]:
    """What runs, by its step, after the name of the interpreter."""
    return {
        "tests": ["-m", "pytest", "-q", "-m", "gpu", "tests"],
        "sweep": ["-m", "benchmarks.sweep", "--device", device, "--models", SWEPT, "--results", str(folder)],
        "compare": ["-m", "benchmarks.compare", "--device", device, "--results", str(folder)],
        "demo": ["-m", "lowtide", "demo", "--device", device, "--output", str(folder / "demo")],
    }


def document(device: Accelerator, done: Sequence[Done]) -> str:
    """What ran, on what, and how it ended."""
    total_bytes = device.total_bytes()
    size = "memory of unknown size" if total_bytes is None else format_bytes(total_bytes)
    lines = [
        f"# {device.name()}",
        "",
        f"`make gpu`: {size}, one device of {torch.accelerator.device_count()}; torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, HIP {torch.version.hip}, Python {platform.python_version()}, {platform.platform()}, "
        f"{os.cpu_count()} cores.",
        "",
        "| step | command | outcome | seconds |",
        "|---|---|---|---:|",
    ]
    for each in done:
        outcome = "passed" if each.exit_code == 0 else f"failed, exit code {each.exit_code}: {each.step}.log"
        lines.append(f"| {each.step} | `python {each.command}` | {outcome} | {each.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _run(step: str, command: Sequence[str], folder: Path) -> Done:
    """The step, what it says shown and kept in ``STEP.log``."""
    sys.stdout.write(f"\n=== {step}: {' '.join(command)}\n")
    start = time.monotonic()
    with (folder / f"{step}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            log.write(line)
    taken = time.monotonic() - start
    return Done(step, " ".join(command), process.wait(), taken)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--steps", default=",".join(STEPS), help="some of them, with commas (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

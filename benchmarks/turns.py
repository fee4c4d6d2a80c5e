"""Ways to train, side by side: each in a process of its own, in turns of a few steps, so that all meet the same machine.

A benchmark starts itself once for each way. The process trains when a line comes in, and answers with a line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lowtide.store import write_atomically

_STEPS = 3  # in a turn


def compared(module: str, arguments: Sequence[str], ways: Iterable[str], rounds: int) -> dict[str, Any]:
    """What ``python -m MODULE --train ARGUMENTS WAY`` tells of each of ``ways``, the first being what the others are compared
    with: its last answer, the median of its ``seconds`` and their ratio; and whether the losses of all are ``equal``."""
    command = [sys.executable, "-m", module, "--train", *arguments]
    pipe = subprocess.PIPE
    children = {way: subprocess.Popen([*command, way], stdin=pipe, stdout=pipe, text=True) for way in ways}
    told: dict[str, list[dict[str, Any]]] = {way: [] for way in children}
    for _ in range(rounds + 1):  # the first one warms up
        for way, child in children.items():
            assert child.stdin is not None and child.stdout is not None
            print("go", file=child.stdin, flush=True)
            told[way].append(json.loads(child.stdout.readline()))
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    seconds = {way: statistics.median(s for turn in turns[1:] for s in turn["seconds"]) for way, turns in told.items()}
    first = next(iter(seconds.values()))
    return {
        "equal": len({tuple(turn["digest"] for turn in turns) for turns in told.values()}) == 1,
        "ways": {
            way: {**turns[-1], "seconds": seconds[way], "time_ratio": seconds[way] / first}
            for way, turns in told.items()
        },
    }


def asked(module: str, about: str | None, models: str, budgets: str, results: Path) -> argparse.Namespace:
    """The options of such a benchmark: ``models`` and ``budgets`` by default, and where the ``results`` go."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--models", default=models)
    parser.add_argument("--budgets", default=budgets)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=results, help="written as .json and .md")
    parser.add_argument("--train", nargs=3, metavar=("MODEL", "BUDGET", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def all_compared(
    module: str, options: argparse.Namespace, ways: Iterable[str], lines: Callable[[dict[str, Any]], Iterable[str]]
) -> list[dict[str, Any]]:
    """A row for each model and budget, whose ``lines`` are printed as it is known."""
    rows: list[dict[str, Any]] = []
    for model, budget in itertools.product(options.models.split(","), options.budgets.split(",")):
        found = compared(module, [model, budget], ways, options.rounds)
        rows.append({"model": model, "budget": budget, **found})
        print("\n".join(lines(rows[-1])), flush=True)
    return rows


def keep(output: Path, rows: list[dict[str, Any]], table: str) -> None:
    """Write the results, as JSON and as a page."""
    write_atomically(output.with_suffix(".json"), json.dumps(rows, indent=1) + "\n")
    write_atomically(output.with_suffix(".md"), table)


def serve(step: Callable[[], Any], clear: Callable[[], None], facts: dict[str, Any]) -> int:
    """Train on demand. ``step`` returns its loss; ``clear`` lets go of what a step leaves, before one is measured. ``facts``
    are told along."""
    import lowtide

    digest = hashlib.sha256()
    for _ in sys.stdin:
        seconds = []
        for _ in range(_STEPS):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
            digest.update(loss.detach().numpy().tobytes())
        del loss
        clear()
        peak = lowtide.measure(step).peak_bytes
        print(json.dumps({"seconds": seconds, "digest": digest.hexdigest(), "peak_bytes": peak, **facts}), flush=True)
    return 0

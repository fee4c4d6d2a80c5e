"""Step time, page faults and memory with and without an arena, side by side: ``python -m benchmarks.arena``.

Each model trains under the same plan in two processes, one with an arena, in turns of a few steps; the figures are medians over
all steps of a process, and ratios of them. Results are compared to the bit. ``placed``, ``taken``, ``crowded``: allocations
of a step that went to their places, that found them taken, and that an operator uses inside and found no room for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lowtide.store import write_atomically

RESULTS = Path(__file__).parent / "results" / "arena"
MODELS = ("gpt2", "t5", "vit", "resnet50", "unet")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default="50%")
    parser.add_argument("--compilers", default="eager", help="or eager,inductor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS, help="written as .json and .md")
    parser.add_argument("--train", nargs=4, metavar=("MODEL", "BUDGET", "COMPILER", "ARENA"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        return _train(*asked.train)
    rows = []
    for model in asked.models.split(","):
        for compiler in asked.compilers.split(","):
            for budget in asked.budgets.split(","):
                rows.append(_compare(model, budget, compiler, asked.rounds))
                print(_line(rows[-1]), flush=True)
    write_atomically(asked.output.with_suffix(".json"), json.dumps(rows, indent=1) + "\n")
    write_atomically(asked.output.with_suffix(".md"), _table(rows))
    return 0


def _compare(model: str, budget: str, compiler: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.arena", "--train", model, budget, compiler]
    pipe = subprocess.PIPE
    children = [subprocess.Popen([*command, arena], stdin=pipe, stdout=pipe, text=True) for arena in ("no", "yes")]
    told: list[list[dict[str, Any]]] = [[], []]
    for turn in range(rounds + 1):  # the first one warms up
        for child, heard in zip(children, told, strict=True):
            assert child.stdin is not None and child.stdout is not None
            print("go", file=child.stdin, flush=True)
            heard.append(json.loads(child.stdout.readline()))
            if turn == 0:
                heard.clear()
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    without, within = told

    def ratio(name: str) -> float:
        medians = [statistics.median(value for turn in turns for value in turn[name]) for turns in (within, without)]
        return medians[0] / medians[1] if medians[1] else float("nan")

    def median(turns: list[dict[str, Any]], name: str) -> float:
        return statistics.median(value for turn in turns for value in turn[name])

    same = [turn["digest"] for turn in within] == [turn["digest"] for turn in without]
    facts = ("placed", "taken", "crowded", "unexpected", "peak_bytes", "reserved_bytes", "planned_reserved_bytes")
    return {
        "model": model, "budget": budget, "compiler": compiler, "time_ratio": ratio("seconds"),
        "faults_without": median(without, "faults"), "faults_with": median(within, "faults"),
        "resident_growth_without": without[-1]["grown_bytes"], "resident_growth_with": within[-1]["grown_bytes"],
        "equal": same, **{name: within[-1][name] for name in facts},
    }  # fmt: skip


def _train(name: str, budget: str, compiler: str, arena: str) -> int:
    """Steps on demand: a line of input is a turn, and one of output tells of it."""
    import torch

    import lowtide
    from benchmarks.compare.models import SMALL
    from benchmarks.zoo import loss_of

    torch.manual_seed(0)
    model, args, kwargs = SMALL[name].sample()
    chosen: dict[str, Any] = {"budget": budget, "compiler": compiler, "planning": "wait", "planner": "auto{effort=1}"}
    lowtide.rematerialize(model, args, kwargs, arena=arena == "yes", **chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    digest = hashlib.sha256()
    resident = _resident_bytes()

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())

    for _ in sys.stdin:
        seconds, faults = [], []
        for _ in range(3):
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        optimizer.zero_grad()
        (plan,), found = lowtide.plans(model), {"placed": 0, "taken": 0, "crowded": 0, "unexpected": 0}
        own = list(model.forward._arenas.values())
        before_counts = own[0].counts if own else (0,) * 4
        measured = lowtide.measure(lambda: loss_of(model(*args, **kwargs)).backward())
        if own:
            found = dict(zip(found, (b - a for a, b in zip(before_counts, own[0].counts, strict=True)), strict=True))
        told = {
            "seconds": seconds, "faults": faults, "digest": digest.hexdigest(), "peak_bytes": measured.peak_bytes,
            "reserved_bytes": measured.reserved_bytes, "planned_reserved_bytes": plan.reserved_bytes,
            "grown_bytes": _resident_bytes() - resident, **found,
        }  # fmt: skip
        print(json.dumps(told), flush=True)
    return 0


def _resident_bytes() -> int:
    """The most that the process has had of the machine's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['model']} | {row['compiler']} | {row['budget']} | {row['time_ratio']:.2f} | {row['faults_without']:.0f} "
        f"| {row['faults_with']:.0f} | {row['placed']} | {row['taken']} | {row['crowded']} | {row['peak_bytes'] / 2**20:.1f} "
        f"| {row['reserved_bytes'] / 2**20:.1f} | {row['planned_reserved_bytes'] / 2**20:.1f} "
        f"| {'yes' if row['equal'] else 'NO'} |"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| model | kernels | budget | time of a step, with / without | page faults without | with | placed | taken | crowded "
        "| peak, MiB | reserved | planned | losses equal |"
    )
    lines = [
        "# Steps with an arena",
        "",
        "`OMP_NUM_THREADS=1 python -m benchmarks.arena`: one step, medians; MiB of a step with the arena.",
        "",
        head,
    ]
    return "\n".join([*lines, "|" + " --- |" * 13, *map(_line, rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

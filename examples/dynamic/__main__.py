"""Train one of the dynamic programs twice from the same seeds, plainly and under ``lowtide.online``, and compare.

Exit code 1 if the promise is broken: other losses or parameters, or a peak above the budget.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from typing import Any

import torch

import lowtide
from examples.dynamic import NAMES, load
from examples.dynamic.program import Program, seeded
from lowtide.budget import parse_budget
from lowtide.units import format_bytes, format_percent, format_time


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training and what it took."""

    program: Program
    losses: list[tuple[torch.Tensor, ...]]
    measurement: lowtide.Measurement

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [tensor for module in self.program.modules for tensor in module.state_dict().values()]


def main() -> int:
    options = _parse()
    make = load(options.program)
    make(options.size).step(0)  # what is made once in a process is made before anything is measured
    plain = _train(make(options.size), options.steps, contextlib.nullcontext())
    budget_bytes = parse_budget(options.budget, plain.measurement.peak_bytes)
    session = lowtide.online(budget_bytes, heuristic=options.heuristic)
    online = _train(make(options.size), options.steps, session)
    _print_losses(plain, online)
    return _print_result(plain, online, budget_bytes, session.statistics)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.dynamic", description=__doc__)
    parser.add_argument("program", choices=NAMES)
    parser.add_argument("--budget", default="50%", help='for instance "50%%" of the plain peak (the default) or "1GiB"')
    parser.add_argument("--size", type=int, default=1, help="the amount of data in a step (default: 1)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default: 5)")
    parser.add_argument("--heuristic", default="dtr-eq", help="what is evicted first (default: dtr-eq)")
    return parser.parse_args()


def _train(program: Program, steps: int, context: contextlib.AbstractContextManager[Any]) -> Run:
    losses: list[tuple[torch.Tensor, ...]] = []

    def train() -> None:
        with context:
            losses.extend(program.step(index) for index in range(steps))

    with seeded(1):
        measurement = lowtide.measure(train)
    return Run(program, losses, measurement)


def _print_losses(plain: Run, online: Run) -> None:
    count = sum(parameter.numel() for module in plain.program.modules for parameter in module.parameters())
    print(f"{plain.program.name}, {count:,} parameters, {len(plain.losses)} steps\n")
    print("step  loss, plain           loss, lowtide.online")
    for step, (theirs, ours) in enumerate(zip(plain.losses, online.losses, strict=True)):
        for first, second in zip(theirs, ours, strict=True):
            print(f"{step:>4}  {first.item():<20.17g}  {second.item():.17g}")


def _print_result(plain: Run, online: Run, budget_bytes: int, statistics: Any) -> int:
    losses = [[loss.item() for step in run.losses for loss in step] for run in (plain, online)]
    same_losses = losses[0] == losses[1]
    same_parameters = all(map(torch.equal, plain.parameters, online.parameters))
    peak_bytes, plain_bytes = online.measurement.peak_bytes, plain.measurement.peak_bytes
    verdict = "kept" if peak_bytes <= budget_bytes else "BROKEN"
    print(f"\nlosses      {_equality(same_losses)}")
    print(f"parameters  {_equality(same_parameters)} at the end")
    share = format_percent(peak_bytes / plain_bytes)
    print(f"peak        plain {format_bytes(plain_bytes)}; online {format_bytes(peak_bytes)} ({share} of plain)")
    print(f"            budget {format_bytes(budget_bytes)}: {verdict}")
    print(f"evicted     {statistics.evictions} times in {format_time(statistics.evict_ns)}")
    print(f"rebuilt     {statistics.rematerializations} times in {format_time(statistics.rematerialize_ns)}")
    plain_ns, online_ns = plain.measurement.time_ns, online.measurement.time_ns
    overhead = format_percent(online_ns / plain_ns - 1)
    print(f"time        plain {format_time(plain_ns)}, online {format_time(online_ns)}: overhead {overhead}")
    return 0 if same_losses and same_parameters and peak_bytes <= budget_bytes else 1


def _equality(same: bool) -> str:
    return "equal to the bit" if same else "DIFFERENT"


if __name__ == "__main__":
    raise SystemExit(main())

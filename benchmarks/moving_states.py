"""A whole step, parameters and optimizer states included, in a share of what plain eager takes: ``python -m
benchmarks.moving_states``.

The budget is a share of eager's parameters, buffers, inputs and states and of the peak of its steps above these. With
``optimizer=`` and ``offload="disk"`` the plan may let gradients go, recompute, move activations, and keep states in a file
between updates. Both ways train side by side, in turns of a few steps; losses are compared to the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.optimizer import MODELS, _models
from benchmarks.turns import all_compared, asked, keep, serve

RESULTS = Path(__file__).parent / "results" / "moving_states"
_MODULE = "benchmarks.moving_states"


def main() -> int:
    options = asked(_MODULE, __doc__, ",".join(MODELS), "30%", RESULTS)
    if options.train:
        return _train(*options.train)
    rows = all_compared(_MODULE, options, ("eager", "planned"), _lines)
    keep(options.output, rows, _table(rows))
    return 0


class _Training:
    """A model, its arguments and its optimizer, and steps with them."""

    def __init__(self, name: str) -> None:
        import torch

        torch.manual_seed(0)
        self.model, self.kwargs, self.optimizer = _models()[name]()
        self.losses: list[torch.Tensor] = []

    def step(self) -> Any:
        self.losses[:] = [self.model(**self.kwargs).loss]
        self.losses[0].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.losses[0]


def _train(name: str, budget: str, way: str) -> int:
    import lowtide
    from lowtide.budget import parse_budget

    facts: dict[str, Any] = _of_eager(_Training(name))
    whole = facts["held_bytes"] + facts["state_bytes"] + facts.pop("plain_peak_bytes")
    facts["budget_bytes"] = parse_budget(budget, whole)
    training = _Training(name)
    if way != "eager":
        told = {"offload": "disk", "planning": "wait", "optimizer": training.optimizer}
        try:
            lowtide.rematerialize(training.model, (), training.kwargs, total_budget=facts["budget_bytes"], **told)
        except lowtide.InfeasibleBudgetError as error:  # the least that is met instead
            facts["budget_bytes"] = error.minimum_bytes
            lowtide.rematerialize(training.model, (), training.kwargs, total_budget=facts["budget_bytes"], **told)
        facts["share"] = facts["budget_bytes"] / whole
        (plan,) = lowtide.plans(training.model)
        moved = plan.outside.rpartition("optimizer states ")[2]
        facts |= {"plan_bytes": plan.peak_bytes, "overhead": plan.overhead, "states_there": moved}
    return serve(training.step, training.losses.clear, facts)


def _of_eager(training: _Training) -> dict[str, int]:
    """Bytes that are held, and that its steps take above these."""
    import torch

    import lowtide
    from lowtide.program.sizes import held_bytes

    training.step()
    peak = lowtide.measure(training.step).peak_bytes
    inputs = [value for value in training.kwargs.values() if isinstance(value, torch.Tensor)]
    states = [v for s in training.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    held = held_bytes([*training.model.parameters(), *training.model.buffers(), *inputs])
    return {"held_bytes": held, "state_bytes": held_bytes(states), "plain_peak_bytes": peak}


def _lines(row: dict[str, Any]) -> list[str]:
    found = []
    for way, figures in row["ways"].items():
        above = figures["held_bytes"] + (figures["state_bytes"] if way == "eager" else 0)
        budget = f"{figures['budget_bytes'] / 2**20:.1f} ({figures['share']:.0%})" if "share" in figures else ""
        planned = f"{figures['plan_bytes'] / 2**20:.1f}" if "plan_bytes" in figures else ""
        there = figures.get("states_there", f"{figures['state_bytes'] / 2**20:.1f} MiB")
        found.append(
            f"| {row['model']} | {way} | {budget} | {above / 2**20:.1f} "
            f"| {there} | {planned} | {figures['peak_bytes'] / 2**20:.1f} | {figures.get('overhead', 0):.1%} "
            f"| {figures['time_ratio']:.2f} | {'yes' if row['equal'] else 'NO'} |"
        )
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "`OMP_NUM_THREADS=1 python -m benchmarks.moving_states`: whole steps (forward, backward, `step`, `zero_grad`) in a",
        "share of eager's memory, parameters and states included. MiB. Held: parameters, buffers, inputs, and for eager the",
        "states; what a step takes above them is its peak. Where a share cannot be met, it is the least that can.",
        "",
        "| model | how | budget | held | states there | planned | peak of a step | predicted overhead | time / eager | equal |",
    ]
    return "\n".join([*lines, "|" + " --- |" * 10, *(line for row in rows for line in _lines(row))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

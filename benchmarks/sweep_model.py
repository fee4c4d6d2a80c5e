"""One model of the sweep: train it under every budget and compare with plain eager PyTorch.

For each budget: plan, train a few iterations beside plain eager from the same state, compare every loss, gradient,
parameter, buffer and the generator to the bit, measure the allocator's peak, and time the step interleaved with the same
program at 100 %. A budget that is infeasible is checked again at the minimum that the error names.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide
from benchmarks.models import MODELS
from benchmarks.zoo import Sample, loss_of, moved
from lowtide.demo.training import repeat_bits
from lowtide.device import find, interface_of

ITERATIONS = 3
TIMINGS = 7
LEARNING_RATE = 0.01
SEED = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Bytes and nanoseconds; overheads as fractions of the program without recomputation.

    ``status``: ``ok``, ``infeasible`` (then ``minimum_bytes`` is set, and the next row is the run at that budget), or
    ``capture`` (the program cannot be captured; ``message`` says why). ``difference`` is the largest relative difference
    from eager, ``difference_from_program`` from the captured program at 100 %.
    """

    model: str
    asked: str
    status: str
    planner: str = ""
    message: str = ""
    ops: int = 0
    eager_peak_bytes: int = 0
    unconstrained_peak_bytes: int = 0
    budget_bytes: int = 0
    minimum_bytes: int = 0
    predicted_peak_bytes: int = 0
    measured_peak_bytes: int = 0
    overhead_predicted: float = 0.0
    overhead_measured: float = 0.0
    eager_step_ns: int = 0
    step_ns: int = 0
    planning_seconds: float = 0.0
    solve_seconds: float = 0.0
    equal: bool = False
    difference: float = 0.0
    difference_from_program: float = 0.0


State = list[dict[str, Any]]


def sweep_model(
    name: str,
    budgets: Sequence[str],
    planner: str = "auto",
    iterations: int = ITERATIONS,
    timings: int = TIMINGS,
    device: str = "cpu",
) -> list[Row]:
    """The rows of one model, in the order of ``budgets``."""
    found = find(device).device
    repeat_bits(found)
    return _Sweep(name, planner, iterations, timings, found).run(budgets)


class _Sweep:
    """What the rows of a model share: the eager run and the program at 100 %."""

    def __init__(self, name: str, planner: str, iterations: int, timings: int, device: torch.device) -> None:
        self.name, self.planner, self.device = name, planner, device
        self.iterations, self.timings = iterations, timings
        self.eager = moved(MODELS[name](), device)
        self.expected = train(self.eager, iterations)
        self.eager_peak_bytes = measured_peak(self.eager)

    def run(self, budgets: Sequence[str]) -> list[Row]:
        try:
            self.program, _ = self._prepared("100%", planner="keep-all")
        except lowtide.CaptureError as error:
            return [Row(self.name, "100%", "capture", message=str(error))]
        self.program_result = train(self.program, self.iterations)
        return [row for budget in budgets for row in self._rows(budget)]

    def _prepared(self, budget: int | str, planner: str) -> tuple[Sample, float]:
        model, args, kwargs = moved(MODELS[self.name](), self.device)
        start = time.perf_counter()
        lowtide.rematerialize(model, args, kwargs, budget=budget, planner=planner, planning="wait")
        return (model, args, kwargs), time.perf_counter() - start

    def _rows(self, asked: str) -> list[Row]:
        try:
            sample, seconds = self._prepared(asked, self.planner)
        except lowtide.InfeasibleBudgetError as error:
            reference = lowtide.plans(self.program[0])[0]
            budget = int(reference.unconstrained_peak_bytes * float(asked.rstrip("%")) / 100)
            refused = Row(
                self.name,
                asked,
                "infeasible",
                planner=self.planner,
                message=str(error),
                unconstrained_peak_bytes=reference.unconstrained_peak_bytes,
                budget_bytes=budget,
                minimum_bytes=error.minimum_bytes,
            )
            sample, seconds = self._prepared(error.minimum_bytes, self.planner)
            return [refused, self._row(f"{asked} (minimum)", sample, seconds)]
        return [self._row(asked, sample, seconds)]

    def _row(self, asked: str, sample: Sample, planning_seconds: float) -> Row:
        plan = lowtide.plans(sample[0])[0]
        found = train(sample, self.iterations)
        eager_ns, program_ns, step_ns = _interleaved([self.eager, self.program, sample], self.timings)
        difference = difference_of(found, self.expected)
        return Row(
            model=self.name,
            asked=asked,
            status="ok",
            planner=plan.planner,
            ops=len(plan.graph.ops),
            eager_peak_bytes=self.eager_peak_bytes,
            unconstrained_peak_bytes=plan.unconstrained_peak_bytes,
            budget_bytes=plan.budget_bytes,
            predicted_peak_bytes=plan.peak_bytes,
            measured_peak_bytes=max(measured_peak(sample) for _ in range(2)),
            overhead_predicted=plan.overhead,
            overhead_measured=step_ns / program_ns - 1,
            eager_step_ns=eager_ns,
            step_ns=step_ns,
            planning_seconds=planning_seconds,
            solve_seconds=plan.solve_seconds,
            equal=difference == 0.0,
            difference=difference,
            difference_from_program=difference_of(found, self.program_result),
        )


def _step(sample: Sample) -> torch.Tensor:
    """One step as trainers do it: the whole result stays alive until the backward pass is done."""
    model, args, kwargs = sample
    result = model(*args, **kwargs)
    loss_of(result).backward()
    return loss_of(result).detach()


def train(sample: Sample, iterations: int) -> State:
    """SGD from a fixed generator state; copies of everything after each iteration."""
    model = sample[0]
    torch.manual_seed(SEED)
    states = []
    for _ in range(iterations):
        model.zero_grad(set_to_none=True)
        loss = _step(sample)
        states.append(_snapshot(model, loss))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    model.zero_grad(set_to_none=True)
    return states


def _snapshot(model: nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    gradients = {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    drawn = {"generator": torch.get_rng_state(), "of the device": interface_of(loss.device).generator().get_state()}
    return {"loss": loss.clone(), **gradients, **state, **drawn}


def difference_of(found: State, expected: State) -> float:
    """0.0 where everything is equal to the bit, else the largest relative difference; infinite where kinds differ."""
    largest = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        for key, tensor in theirs.items():
            largest = max(largest, _relative(ours[key], tensor))
    return largest


def _relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if torch.equal(found, expected):
        return 0.0
    if found.dtype != expected.dtype or not found.is_floating_point():
        return float("inf")
    scale = expected.double().abs().max().item()
    return (found.double() - expected.double()).abs().max().item() / scale if scale > 0 else float("inf")


def measured_peak(sample: Sample) -> int:
    sample[0].zero_grad(set_to_none=True)
    peak = lowtide.measure(_step, sample).peak_bytes
    sample[0].zero_grad(set_to_none=True)
    return peak


def _interleaved(samples: Sequence[Sample], repeats: int) -> list[int]:
    """Median step time of each of the samples, taken in turn."""
    times: list[list[int]] = [[] for _ in samples]
    for _ in range(repeats):
        for index, sample in enumerate(samples):
            sample[0].zero_grad(set_to_none=True)
            device = next(sample[0].parameters()).device
            times[index].append(interface_of(device).timed_ns(functools.partial(_step, sample)))
    for sample in samples:
        sample[0].zero_grad(set_to_none=True)
    return [int(statistics.median(taken)) for taken in times]

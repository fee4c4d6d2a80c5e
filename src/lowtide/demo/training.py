"""Two trainings side by side, step by step, so that both meet the same load of the machine.

Each has its own model, optimizer and generator state. They share only the starting point.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.device import interface_of
from lowtide.extras import require
from lowtide.memory.measurement import Measurement
from lowtide.memory.meter import measure
from lowtide.planning import Plan
from lowtide.program import generators

_LEARNING_RATE = 1e-3
_METERED_EVERY = 8
_MEBIBYTE = 2**20
_COLOURS = ("#888888", "#1f6fb2")


class Training:
    """One training. ``losses`` has one entry per step, ``step_ns`` the times of timed steps, ``measurements`` those of
    the others."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.losses: list[float] = []
        self.step_ns: list[int] = []
        self.measurements: list[Measurement] = []
        self.earlier_peak_bytes = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        self.device = next(model.parameters()).device
        self.generator = generators.default_generator(self.device)
        with generators.kept(self.device):
            self.generator_state = self.generator.manual_seed(0).get_state()

    @property
    def peak_bytes(self) -> int:
        return max(measurement.peak_bytes for measurement in self.measurements)

    def settle(self) -> None:
        """Forget the times and measurements so far, except for the highest peak."""
        peaks = [self.earlier_peak_bytes, *(measurement.peak_bytes for measurement in self.measurements)]
        self.earlier_peak_bytes = max(peaks)
        self.measurements.clear()
        self.step_ns.clear()

    def step(self, batch: torch.Tensor, *, metered: bool) -> None:
        """One training step, in which either memory or time is measured."""
        with generators.kept(self.device):
            self.generator.set_state(self.generator_state)
            self.optimizer.zero_grad(set_to_none=True)
            start = time.perf_counter_ns()
            if metered:
                self.measurements.append(measure(self._pass, batch))
            else:
                self._pass(batch)
            self.optimizer.step()
            interface_of(self.device).synchronize()
            if not metered:
                self.step_ns.append(time.perf_counter_ns() - start)
            self.generator_state = self.generator.get_state()

    def _pass(self, batch: torch.Tensor) -> None:
        """Forward and backward pass, which the budget is for."""
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.losses.append(loss.item())


def repeat_bits(device: torch.device) -> None:
    """Use deterministic operators from now on. On an accelerator some are not deterministic by default, such as the
    gradients of attention, so that even plain PyTorch differs from itself."""
    if not interface_of(device).repeats_bits:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
        torch.use_deterministic_algorithms(True)


def train_side_by_side(runs: list[Training], batches: list[torch.Tensor]) -> Iterator[int]:
    """Train each of the runs on every batch. Memory is measured at the second step and some later ones.

    The order of the runs alternates, so that neither always goes first. Yields the number of steps done.
    """
    for index, batch in enumerate(batches):
        for run in runs if index % 2 == 0 else runs[::-1]:
            run.step(batch, metered=index % _METERED_EVERY == 1)
        yield index


def same_parameters(first: nn.Module, second: nn.Module) -> bool:
    """Whether all parameters and buffers are equal to the bit."""
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def memory_figure(measurements: dict[str, Measurement], plan: Plan) -> Any:
    """A ``matplotlib.figure.Figure``: bytes above the start of the step against the fraction of the step's time."""
    require("matplotlib")
    figure_class = require("matplotlib.figure").Figure
    figure = figure_class(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (name, measurement), colour in zip(measurements.items(), _COLOURS, strict=True):
        times = [at / measurement.time_ns for at, _ in measurement.timeline]
        levels = [level / _MEBIBYTE for _, level in measurement.timeline]
        peak = measurement.peak_bytes / _MEBIBYTE
        label = f"{name}: peak {peak:.1f} MiB"
        if times:
            axes.step(times, levels, where="post", color=colour, linewidth=1, label=label)
        else:  # an accelerator reports only its peak
            axes.axhline(peak, color=colour, linewidth=1, label=label)
    axes.axhline(plan.budget_bytes / _MEBIBYTE, color="#c0392b", linestyle="--", linewidth=1, label="budget")
    axes.set(xlabel="forward and backward pass (share of its time)", ylabel="memory above the start (MiB)")
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure

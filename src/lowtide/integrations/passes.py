"""Figures for trainers' callbacks: predicted and measured peak and overhead of the passes of a training step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from lowtide.api import runtime_of
from lowtide.device import accelerator_in_use
from lowtide.memory.allocators import Meter, PeakWindow, meter_of
from lowtide.planning import Plan
from lowtide.runtime.planned import Planned


class PassMeter:
    """Measures peak and time of the forward and backward passes of a step.

    Callbacks call ``begin`` before the first pass, ``stop`` after each, ``start`` before each further one, and ``end``
    after the last. ``peak_bytes``: the highest level above that at the start of a pass. ``time_ns``: the duration of
    the last pass. ``history``: (step number, peak bytes) of every step, except steps in which operators were measured
    for a plan. Bytes are those of the accelerator's allocator, or on the CPU exact if lowtide's counter can be
    installed.
    """

    def __init__(self) -> None:
        self.peak_bytes = self.time_ns = 0
        self.history: list[tuple[int, int]] = []
        self._plans = 0
        self._window: PeakWindow | None = None
        self._start_ns: int | None = None
        _meter()  # installs the counter

    def begin(self, model: nn.Module) -> None:
        self.peak_bytes, self._plans = 0, _plan_count(model)
        self.start()

    def start(self) -> None:
        meter = _meter()
        self._window = None if meter is None else PeakWindow(meter)
        self._start_ns = time.monotonic_ns()

    def stop(self) -> None:
        """End a pass. Does nothing without a ``start`` before."""
        if self._start_ns is None:
            return
        _meter()
        if self._window is not None:
            self.peak_bytes = max(self.peak_bytes, self._window.peak_bytes)
            self._window.close()
        self.time_ns = time.monotonic_ns() - self._start_ns
        self._start_ns = self._window = None

    def end(self, model: nn.Module, step: int) -> bool:
        """End a step. Returns whether it counts, that is, no plan was made in it."""
        counts = _plan_count(model) == self._plans
        if counts:
            self.history.append((step, self.peak_bytes))
        return counts

    def figures(self, model: nn.Module, peak_bytes: int) -> dict[str, float]:
        """Figures for a log, in MiB and fractions; empty if no call has run by a plan.

        The measured overhead is the last pass's time divided by the sum of the operators' measured times without
        recomputation, minus 1. It includes everything else that the step does.
        """
        plans = latest_plans(model)
        if not plans:
            return {}
        alone_ns = max(sum(plan.costs.total_time_ns for plan in plans), 1)
        result = {
            "lowtide_budget_mib": _mib(max(plan.budget_bytes for plan in plans)),
            "lowtide_predicted_peak_mib": _mib(max(plan.peak_bytes for plan in plans)),
            "lowtide_predicted_overhead": round(sum(plan.time_ns for plan in plans) / alone_ns - 1, 4),
        }
        if _meter() is not None:
            result["lowtide_measured_peak_mib"] = _mib(peak_bytes)
        if self.time_ns:
            result["lowtide_measured_overhead"] = round(self.time_ns / alone_ns - 1, 4)
        return result


def _mib(nbytes: int) -> float:
    return round(nbytes / 2**20, 3)


def _meter() -> Meter | None:
    """The meter of the current accelerator, synchronized, if the program uses one; else that of the CPU."""
    accelerator = accelerator_in_use()
    if accelerator is None:
        return meter_of(torch.device("cpu"))
    accelerator.synchronize()
    return meter_of(accelerator.device)


def latest_plans(model: nn.Module) -> list[Plan]:
    """For every rematerialized module in ``model``, the plan of its last call."""
    return [runtime.latest.plan for runtime in _runtimes(model) if runtime.latest is not None]


def _plan_count(model: nn.Module) -> int:
    return sum(len(entries) for runtime in _runtimes(model) for entries in runtime.entries.values())


def _runtimes(model: nn.Module) -> Iterator[Planned]:
    """The planned forwards in ``model``, including those of parts."""
    for module in model.modules():
        runtime = runtime_of(module)
        if runtime is not None:
            yield runtime
            yield from runtime.parts.planned() if runtime.parts else ()

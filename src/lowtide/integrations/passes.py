"""What trainers' callbacks report: predicted and measured peak and overhead of the passes of a training step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.api import runtime_of
from lowtide.memory.allocators import Meter, PeakWindow, meter_of
from lowtide.planning import Plan


@dataclass(slots=True)
class PassMeter:
    """Peak and time between ``start`` and ``stop``, which callbacks call before a forward and after a backward pass.

    On the CPU the bytes are exact where lowtide's counter can be installed (``available``), on CUDA they are those of the
    caching allocator. The peak is that above the level at ``start``.
    """

    peak_bytes: int = 0
    time_ns: int = 0
    _window: PeakWindow | None = None
    _start_ns: int | None = None

    def __post_init__(self) -> None:
        _meter()  # counts from now on

    @property
    def available(self) -> bool:
        return _meter() is not None

    def start(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        meter = _meter()
        self._window = None if meter is None else PeakWindow(meter)
        self._start_ns = time.monotonic_ns()

    def stop(self) -> None:
        """Sets ``peak_bytes`` and ``time_ns``; without a ``start`` before, does nothing."""
        if self._start_ns is None:
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        if self._window is not None:
            self.peak_bytes = self._window.peak_bytes
            self._window.close()
        self.time_ns = time.monotonic_ns() - self._start_ns
        self._start_ns = self._window = None


def _meter() -> Meter | None:
    """Of the current CUDA device once the program uses CUDA, else of the CPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return meter_of(torch.device("cuda", torch.cuda.current_device()))
    return meter_of(torch.device("cpu"))


def latest_plans(model: nn.Module) -> list[Plan]:
    """For every rematerialized module in ``model``, the plan that its last call ran."""
    runtimes = [runtime_of(module) for module in model.modules()]
    return [runtime.latest.plan for runtime in runtimes if runtime is not None and runtime.latest is not None]


def plan_count(model: nn.Module) -> int:
    """How many plans were made in ``model`` so far. The step that makes one measures operators too: its peak is not its own."""
    runtimes = [runtime_of(module) for module in model.modules()]
    return sum(len(entries) for runtime in runtimes if runtime is not None for entries in runtime.entries.values())


def figures(model: nn.Module, meter: PassMeter, passes: int = 1) -> dict[str, float]:
    """What a log shows of the last step, in MiB and fractions; empty as long as nothing ran by a plan.

    ``passes`` is how many forward and backward passes the meter saw. The measured overhead is the step's time over the sum
    of the operators' own measured times without recomputation: whatever else the step does is in it too.
    """
    plans = latest_plans(model)
    if not plans:
        return {}
    alone_ns = sum(plan.costs.total_time_ns for plan in plans)
    result = {
        "lowtide_budget_mib": _mib(max(plan.budget_bytes for plan in plans)),
        "lowtide_predicted_peak_mib": _mib(max(plan.peak_bytes for plan in plans)),
        "lowtide_predicted_overhead": round(sum(plan.time_ns for plan in plans) / max(alone_ns, 1) - 1, 4),
    }
    if meter.available:
        result["lowtide_measured_peak_mib"] = _mib(meter.peak_bytes)
    if meter.time_ns:
        result["lowtide_measured_overhead"] = round(meter.time_ns / max(passes * alone_ns, 1) - 1, 4)
    return result


def _mib(nbytes: int) -> float:
    return round(nbytes / 2**20, 3)

"""What trainers' callbacks report: predicted and measured peak and overhead of the passes of a training step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import nn

from lowtide.api import runtime_of
from lowtide.memory import cpu_allocator
from lowtide.planning import Plan


@dataclass(slots=True)
class PassMeter:
    """Peak and time between ``start`` and ``stop``, which callbacks call before a forward and after a backward pass.

    On the CPU the bytes are exact where lowtide's counter can be installed (``available``), on CUDA they are those of the
    caching allocator. The peak is that above the level at ``start``.
    """

    peak_bytes: int = 0
    time_ns: int = 0
    _start_bytes: int = 0
    _peak_before: int = 0
    _start_ns: int = 0
    _running: bool = False
    _counter: cpu_allocator.AllocationCounter | None = field(default_factory=cpu_allocator.install)

    @property
    def available(self) -> bool:
        return torch.cuda.is_initialized() or self._counter is not None  # type: ignore[no-untyped-call]

    def start(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start_bytes = torch.cuda.memory_allocated()
        elif self._counter is not None:
            self._peak_before = self._counter.peak_bytes
            self._start_bytes = self._counter.reset_peak()
        self._start_ns = time.monotonic_ns()
        self._running = True

    def stop(self) -> None:
        """Sets ``peak_bytes`` and ``time_ns``; without a ``start`` before, does nothing."""
        if not self._running:
            return
        self._running = False
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._start_bytes
        elif self._counter is not None:
            self.peak_bytes = self._counter.peak_bytes - self._start_bytes
            self._counter.raise_peak(self._peak_before)  # a measurement around this one sees what it would have seen
        self.time_ns = time.monotonic_ns() - self._start_ns


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

"""An exact memory meter for any callable.

On the CPU it reads a counter in front of the allocator (``runtime.cpu_allocator``): all threads, everything that an
operator allocates inside, to the byte. Where that counter cannot be installed it falls back, with one warning, to
``torch.profiler``'s memory events: as exact, but blind to threads that do not inherit the profiler's state. On CUDA it
reads the caching allocator's own statistics (sizes as the allocator rounds them, to 512 bytes).

Not counted, because it does not pass through PyTorch's allocator: scratch that oneDNN, MKL or a Python extension
allocates by itself. A block that is older than the counter (which is installed at the first measurement) is unknown, so
its release is not seen; results are then too high, never too low.
"""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowtide.report.measured import measurement_to_json
from lowtide.runtime import cpu_allocator
from lowtide.store import write_atomically

_LOG_EVENTS = 1 << 20
_COLLECTIONS = 5  # at most, before a measurement
_Level = tuple[int, int]  # (ns since the start, bytes above the level at the start)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call took.

    ``peak_bytes``: the most that the allocator had handed out during the call above the level at its start.
    ``final_bytes``: the level at its end, the result still alive, relative to the start. ``time_ns``: wall clock.
    ``device``: the device that the bytes are of. ``timeline``: (ns since start, bytes above start) at every change;
    empty on CUDA; it stops after a million changes, the peak does not.
    """

    peak_bytes: int
    time_ns: int
    device: str
    timeline: tuple[_Level, ...]
    final_bytes: int = 0

    def save(self, path: str | Path) -> None:
        """Write ``lowtide-measurement/1`` JSON, for ``lowtide report --measurement``. Raises ``PlanError``."""
        write_atomically(Path(path), json.dumps(measurement_to_json(self)) + "\n")


def measure(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Measurement:
    """Call ``fn(*args, **kwargs)`` once and report exact peak memory and time; its result is dropped.

    The bytes are those of the current CUDA device where the call used it, else those of the CPU. What an earlier
    measurement in another thread allocates meanwhile is counted too: the allocator is one.
    """
    collect_garbage()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _measure_cpu(lambda: fn(*args, **kwargs))
    start = _reset_cuda_peak()
    on_cpu = _measure_cpu(lambda: _synchronized(fn, *args, **kwargs))
    peak = torch.cuda.max_memory_allocated() - start
    if peak == 0:
        return on_cpu
    final = torch.cuda.memory_allocated() - start
    return Measurement(peak, on_cpu.time_ns, f"cuda:{torch.cuda.current_device()}", (), final)


def collect_garbage() -> None:
    """Free what the caller's earlier work left in cycles; again while that frees memory, as finalizers may leave garbage."""
    counter = cpu_allocator.install()
    level: int | None = None
    for _ in range(_COLLECTIONS):
        gc.collect()
        previous, level = level, counter.level_bytes if counter is not None else 0
        if level == previous:
            break


def allocated_bytes(device: torch.device) -> int | None:
    """What PyTorch's allocator has handed out on ``device`` by now, up to a constant; ``None`` where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    counter = cpu_allocator.install() if device.type == "cpu" else None
    return None if counter is None else counter.level_bytes


def allocation_peak(fn: Callable[[], Any]) -> tuple[int, int]:
    """The cheap form, for the CPU: (peak, level at the end with the result alive), both above the starting level."""
    counter = cpu_allocator.install()
    if counter is None:
        changes, _ = _profile(fn)
        return _peak_and_final(changes)
    before, start = counter.peak_bytes, counter.reset_peak()
    try:
        result = fn()
        end, peak = counter.level_bytes, counter.peak_bytes
        del result
    finally:
        counter.raise_peak(before)  # a measurement around this one sees what it would have seen
    return peak - start, end - start


def _reset_cuda_peak() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _synchronized(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = fn(*args, **kwargs)
    torch.cuda.synchronize()
    return result


def _measure_cpu(fn: Callable[[], Any]) -> Measurement:
    counter = cpu_allocator.install()
    if counter is None:
        changes, time_ns = _profile(fn)
        peak, end = _peak_and_final(changes)
        return Measurement(peak, time_ns, "cpu", tuple(changes), end)
    log = np.empty((_LOG_EVENTS, 2), dtype=np.int64)
    before, start = counter.peak_bytes, counter.reset_peak()
    uncounted = counter.uncounted_blocks
    logging = counter.start_log(log.ctypes.data, _LOG_EVENTS)
    start_ns = time.monotonic_ns()
    try:
        result = fn()
        time_ns = time.monotonic_ns() - start_ns
        end, peak = counter.level_bytes, counter.peak_bytes
        del result
    finally:
        events = counter.stop_log() if logging else 0
        counter.raise_peak(before)
    if counter.uncounted_blocks != uncounted:
        warnings.warn("more tensors are alive than the allocation counter holds: peak_bytes is too low", stacklevel=3)
    rows = log[: min(events, _LOG_EVENTS)] - np.array([start_ns, start])
    inside = rows[rows[:, 0] <= time_ns]
    return Measurement(peak - start, time_ns, "cpu", tuple(map(tuple, inside.tolist())), end - start)


def _peak_and_final(events: list[_Level]) -> _Level:
    levels = [0, *(level for _, level in events)]
    return max(levels), levels[-1]


def _profile(fn: Callable[[], Any]) -> tuple[list[_Level], int]:
    """(ns since start, level) from the profiler's memory events in time order, and the call's time."""
    warnings.warn(
        "lowtide's allocation counter is not available on this build of PyTorch; memory is measured with "
        "torch.profiler, which does not see plain Python threads",
        stacklevel=4,
    )
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        start_ns = time.perf_counter_ns()
        result = fn()
        time_ns = time.perf_counter_ns() - start_ns
    raw = profiler.profiler.kineto_results.events() if profiler.profiler is not None else []
    changes = [(event.start_ns(), event.nbytes()) for event in raw if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    del result  # only now: its release is no part of the call
    levels = np.cumsum([nbytes for _, nbytes in changes], dtype=np.int64).tolist()
    origin = changes[0][0] if changes else 0
    return [(at - origin, level) for (at, _), level in zip(changes, levels, strict=True)], time_ns

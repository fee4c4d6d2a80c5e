"""An exact memory meter for any callable.

On the CPU it reads the counter in front of the allocator (``memory.cpu_allocator``). If that cannot be installed, it
warns once and uses the memory events of ``torch.profiler``, which are as exact but miss threads that do not inherit the
profiler's state. On an accelerator it reads the allocator's own statistics (sizes as the allocator rounds them, on CUDA
to 512 bytes).

Memory that does not come from PyTorch's allocator is not counted: scratch of oneDNN, MKL or a Python extension. The
release of blocks older than the first measurement is not seen, so results are then too high, never too low.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowtide.device import Accelerator, accelerator_in_use, accelerators
from lowtide.errors import PlanError
from lowtide.memory import cpu_allocator
from lowtide.memory.allocators import PeakWindow, accelerator_meter, reserved_meter
from lowtide.memory.measurement import Measurement

_LOG_EVENTS = 1 << 20
_COLLECTIONS = 5  # most garbage collections before a measurement
_Level = tuple[int, int]  # (ns since the start, bytes above the level at the start)


def measure(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Measurement:
    """Call ``fn(*args, **kwargs)`` once and report exact peak memory and time; its result is dropped.

    The bytes are those of the accelerator (a CUDA device, say) on which the call allocated most, or of the CPU if it
    used none. Allocations in other threads meanwhile are counted too, since they share the allocator. Raises
    ``PlanError`` if ``fn`` is not callable.
    """
    if not callable(fn):
        raise PlanError(
            f"measure takes a function that runs what is to be measured, not a {type(fn).__name__}: measure(step), with the "
            "arguments of step behind it, instead of measure(step())."
        )
    collect_garbage()
    used = [] if accelerator_in_use() is None else [each for each in accelerators() if each.has_statistics]
    if not used:
        return _measure_cpu(lambda: fn(*args, **kwargs))
    _synchronize(used)
    with contextlib.ExitStack() as stack:
        windows = [stack.enter_context(PeakWindow(accelerator_meter(each))) for each in used]
        levels: list[int] = []

        def run() -> Any:
            result = fn(*args, **kwargs)
            _synchronize(used)
            levels.extend(window.level_bytes for window in windows)  # with the result alive
            return result

        on_cpu = _measure_cpu(run)
        found = zip(windows, used, levels, strict=True)
        window, accelerator, level = max(found, key=lambda each: each[0].peak_bytes)
        if window.peak_bytes == 0:
            return on_cpu
        reserved = accelerator.reserved_peak_bytes() - window.start_bytes
        return Measurement(window.peak_bytes, on_cpu.time_ns, str(accelerator.device), (), level, reserved)


def collect_garbage() -> None:
    """Collect reference cycles of earlier work; repeatedly while this frees memory, since finalizers may leave
    garbage."""
    counter = cpu_allocator.install()
    level: int | None = None
    for _ in range(_COLLECTIONS):
        gc.collect()
        previous, level = level, counter.level_bytes if counter is not None else 0
        if level == previous:
            break


def allocation_peak(fn: Callable[[], Any]) -> tuple[int, int]:
    """A cheap form for the CPU: (peak, level at the end with the result alive), both above the level at the start."""
    found = _measure_cpu(fn, log_events=0)
    return found.peak_bytes, found.final_bytes


def _synchronize(used: Sequence[Accelerator]) -> None:
    """Wait for the devices in use. Others have no work, and a query would initialize them."""
    for each in used:
        if each.peak_bytes():
            each.synchronize()


def _measure_cpu(fn: Callable[[], Any], log_events: int = _LOG_EVENTS) -> Measurement:
    counter = cpu_allocator.install()
    if counter is None:
        changes, time_ns = _profile(fn)
        levels = [0, *(level for _, level in changes)]
        return Measurement(max(levels), time_ns, "cpu", tuple(changes), levels[-1])
    log = np.empty((log_events, 2), dtype=np.int64)
    uncounted = counter.uncounted_blocks
    with PeakWindow(counter) as window, PeakWindow(reserved_meter(counter)) as taken:
        logging = log_events > 0 and counter.start_log(log)
        start_ns = time.monotonic_ns()
        try:
            result = fn()
            time_ns = time.monotonic_ns() - start_ns
            final, peak = window.level_bytes, window.peak_bytes
            reserved = taken.start_bytes + taken.peak_bytes - window.start_bytes
            del result
        finally:
            events = counter.stop_log() if logging else 0
    if counter.uncounted_blocks != uncounted:
        warnings.warn("more tensors are alive than the allocation counter holds: peak_bytes is too low", stacklevel=3)
    rows = log[: min(events, log_events)] - np.array([start_ns, window.start_bytes])
    inside = rows[rows[:, 0] <= time_ns]
    return Measurement(peak, time_ns, "cpu", tuple(map(tuple, inside.tolist())), final, reserved)


def _profile(fn: Callable[[], Any]) -> tuple[list[_Level], int]:
    """The levels from the profiler's memory events, as (ns since start, level) in time order, and the call's time in
    ns."""
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
    del result  # only now: the release is not part of the call
    levels = np.cumsum([nbytes for _, nbytes in changes], dtype=np.int64).tolist()
    origin = changes[0][0] if changes else 0
    return [(at - origin, level) for (at, _), level in zip(changes, levels, strict=True)], time_ns

"""Time and allocator peak of a call, repeated under the conditions of a training step.

In a step, an operator's result is newly allocated and its arguments have left the caches. In a plain loop, memory-bound
operators take only a half to a fifth of the time. So on the CPU each repetition drops the last result and sweeps a
buffer as large as the last-level cache. This gives 1.0 of the time in a step for every frequent operator of GPT-2 (2
layers, width 256), against 0.3 to 0.8 without. An accelerator's cache is swept too, if its size is known.

The time of the system to provide zeroed pages, when the process grows, is not included. The lower quartile is reported,
because other programs only ever add time, on a busy machine to more than half of the repetitions. When the lower half
lies close together, more repetitions would not change it. Two microseconds count as close, given a sweep of half a
millisecond.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lowtide.device import Accelerator, interface_of
from lowtide.memory.allocators import PeakWindow, accelerator_meter
from lowtide.memory.meter import allocation_peak

_CACHE_SIZES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE_BYTES, _LARGEST_SWEEP_BYTES = 32 << 20, 64 << 20
_FEWEST, _MOST = 5, 25
_FEWEST_LONG, _LONG_NS = 2, 400_000_000  # fewest repetitions if they take this long in total
_FEWEST_STEADY = 9  # repetitions before steady times may end the series
_STEADY, _STEADY_NS = 0.05, 2_000  # median minus least: relative to the least, or in ns


@dataclass(frozen=True, slots=True)
class Timing:
    """``time_ns``: the lower quartile. ``spread_ns``: the median minus the least time. ``peak_bytes``: the most
    allocated by one repetition, without a peak that only one repetition saw, which came from another thread."""

    time_ns: int
    spread_ns: int
    peak_bytes: int


def time_call(
    call: Callable[[], Any], device: torch.device, budget_ns: int, before: Callable[[], Any] = lambda: None
) -> Timing:
    """Repeat ``call`` for about ``budget_ns`` (at least five times, or twice if it takes long), or until times are
    steady. The caller warms up; results are dropped.

    ``before`` runs before each repetition, untimed. Each peak is relative to the start of its repetition.
    """
    found = interface_of(device)
    repeat = functools.partial(_on_accelerator, found) if isinstance(found, Accelerator) else _on_cpu
    times: list[int] = []
    peaks: list[int] = []
    deadline = time.perf_counter_ns() + budget_ns
    while _are_few(times, peaks) or (len(times) < _MOST and time.perf_counter_ns() < deadline):
        before()
        time_ns, peak_bytes = repeat(call)
        times.append(time_ns)
        peaks.append(peak_bytes)
        if len(times) >= _FEWEST_STEADY and _spread(times) <= max(_STEADY * min(times), _STEADY_NS):
            break
    *others, most = sorted(peaks)
    return _summary(times, others[-1] if others[0] == others[-1] else most)


def peak_of(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that one run of ``call`` allocates."""
    found = interface_of(device)
    return _on_accelerator(found, call)[1] if isinstance(found, Accelerator) else allocation_peak(call)[0]


def _are_few(times: list[int], peaks: list[int]) -> bool:
    enough = sum(times) >= _LONG_NS and len({*peaks}) == 1
    return len(times) < (_FEWEST_LONG if enough else _FEWEST)


def _spread(times: list[int]) -> int:
    return statistics.median_high(times) - min(times)


def _on_cpu(call: Callable[[], Any]) -> tuple[int, int]:
    """Time in ns and peak in bytes of one repetition."""
    times: list[int] = []

    def once() -> None:
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)

    _sweep_buffer().max()
    peak, _ = allocation_peak(once)
    return times[0], peak


def _on_accelerator(accelerator: Accelerator, call: Callable[[], Any]) -> tuple[int, int]:
    """The same on the device's own clock, which excludes launch latency hidden behind other work."""
    accelerator.sweep()
    with PeakWindow(accelerator_meter(accelerator)) as window:
        return accelerator.timed_ns(call), window.peak_bytes


@functools.cache
def _sweep_buffer() -> npt.NDArray[np.int64]:
    """A buffer as large as the last-level cache."""
    sizes = [_USUAL_CACHE_BYTES]
    for path in _CACHE_SIZES.glob("index3/size"):
        text = path.read_text(encoding="ascii").strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes = [int(text[:-1]) << 10]
    return np.zeros(min(sizes[0], _LARGEST_SWEEP_BYTES) // 8, dtype=np.int64)


def _summary(samples: list[int], peak_bytes: int) -> Timing:
    lower, *_ = statistics.quantiles(samples, n=4, method="exclusive" if len(samples) >= _FEWEST else "inclusive")
    return Timing(round(lower), _spread(samples), peak_bytes)

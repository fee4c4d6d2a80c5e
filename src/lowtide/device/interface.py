"""The interface of devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class DeviceInterface:
    """One device of PyTorch. The defaults are for a device without memory, such as ``meta``.

    ``granularity_bytes``: the allocator hands out multiples of it. ``repeats_bits``: whether the operators listed in
    ``program.repeating`` give the same bits again. ``overlaps``: whether collectives run beside computation; on a CPU
    they would take its cores.
    """

    granularity_bytes = 1
    repeats_bits = True
    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def name(self) -> str:
        """The maker's name. Devices with equal names are taken to be equally fast."""
        return self.device.type

    def total_bytes(self) -> int | None:
        """The total memory in bytes, if known."""
        return None

    def free_bytes(self) -> int | None:
        """The bytes that could be allocated now, if known."""
        return None

    def release_cached(self) -> None:
        """Return memory that the allocator caches to the device."""

    def warm_up(self) -> None:
        """Make kernel libraries allocate now what they keep from their first call on."""

    def synchronize(self) -> None:
        """Wait until all work of the device is done."""

    def timed_ns(self, call: Callable[[], Any]) -> int:
        """How long the device is busy with ``call``, in nanoseconds. The result is dropped."""
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start

    def generator(self) -> torch.Generator:
        """The default generator of the device's operators."""
        return torch.default_generator

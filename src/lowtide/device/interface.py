"""What a device is to everything here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class DeviceInterface:
    """One device of PyTorch. What is said here holds for one without memory of its own, such as ``meta``.

    ``granularity_bytes``: its allocator hands out multiples of that. ``repeats_bits``: whether operators that
    ``program.repeating`` lists repeat theirs. ``overlaps``: whether collectives run beside computing, whose cores a CPU's would
    take.
    """

    granularity_bytes = 1
    repeats_bits = True
    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def name(self) -> str:
        """As its maker names it: machines whose devices are called alike take equally long."""
        return self.device.type

    def total_bytes(self) -> int | None:
        """What it has in all, as far as that is known."""
        return None

    def free_bytes(self) -> int | None:
        """What could be allocated now, as far as that is known."""
        return None

    def release_cached(self) -> None:
        """Give back to the device what its allocator keeps for later."""

    def warm_up(self) -> None:
        """Have libraries of kernels take now what they keep for themselves from their first call on."""

    def synchronize(self) -> None:
        """Wait until it has nothing left to do."""

    def timed_ns(self, call: Callable[[], Any]) -> int:
        """How long the device is busy with ``call``, whose result is dropped."""
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start

    def generator(self) -> torch.Generator:
        """What its operators draw from by default."""
        return torch.default_generator

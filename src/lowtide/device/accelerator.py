"""Any accelerator, through ``torch.accelerator``'s view of its allocator and queues.

Generators and names are not part of that. They come from the device's own module (``torch.xpu``, say), by names that
these modules share.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from lowtide.device.interface import DeviceInterface
from lowtide.errors import PlanError

_SWEPT = 4  # size of the sweep buffer, in cache sizes


class Accelerator(DeviceInterface):
    """A device with memory and queues of its own. ``device`` has an index."""

    repeats_bits = False
    overlaps = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)
        self._is_warm = False

    def name(self) -> str:
        if hasattr(self.module, "get_device_name"):
            return str(self.module.get_device_name(self.device))
        return str(getattr(self._properties(), "name", self.device.type))

    # --- memory ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def granularity_bytes(self) -> int:  # type: ignore[override]
        """Measured by an allocation of one byte."""
        before = self.allocated_bytes()
        block = torch.UntypedStorage(1, device=self.device)  # type: ignore[no-untyped-call]
        taken = self.allocated_bytes() - before
        del block
        return max(taken, 1)

    @functools.cached_property
    def has_statistics(self) -> bool:
        """Whether PyTorch reports how much its allocator has handed out."""
        try:
            self.allocated_bytes()
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return True

    def allocated_bytes(self) -> int:
        """Bytes that the allocator has handed out and not received back."""
        return self._statistic("allocated_bytes", "current")

    def peak_bytes(self) -> int:
        """The most allocated bytes since ``reset_peak``."""
        return self._statistic("allocated_bytes", "peak")

    def reserved_bytes(self) -> int:
        """Bytes that the allocator has taken from the device."""
        return self._statistic("reserved_bytes", "current")

    def reserved_peak_bytes(self) -> int:
        """The most reserved bytes since ``reset_peak``."""
        return self._statistic("reserved_bytes", "peak")

    def reset_peak(self) -> None:
        """Set both peaks to the present levels."""
        torch.accelerator.reset_peak_memory_stats(self.device)

    def total_bytes(self) -> int | None:
        memory = self._memory()
        return None if memory is None else memory[1]

    def free_bytes(self) -> int | None:
        """Free bytes of the device, plus those that its allocator caches."""
        memory = self._memory()
        return None if memory is None else memory[0] + self.reserved_bytes() - self.allocated_bytes()

    def release_cached(self) -> None:
        torch.accelerator.empty_cache()

    def _statistic(self, name: str, kind: str) -> int:
        """A value of ``torch.accelerator.memory_stats``, without its sorted copy of all values: online mode reads it
        around every operator."""
        if not torch._C._accelerator_isAllocatorInitialized():
            return 0
        return int(torch._C._accelerator_getDeviceStats(self.device.index)[name]["all"][kind])

    def _memory(self) -> tuple[int, int] | None:
        try:
            return torch.accelerator.get_memory_info(self.device)
        except (RuntimeError, NotImplementedError, ValueError):
            return None

    def warm_up(self) -> None:
        """Make libraries allocate their workspaces now (cuBLAS, say), since plans do not contain them. The forward and
        the backward pass run in different threads, each with its own workspaces."""
        if not self._is_warm:
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                matrix = torch.ones(16, 16, device=self.device, requires_grad=True)
                torch.mm(matrix, matrix).sum().backward()  # type: ignore[no-untyped-call]
            self._is_warm = True

    # --- queues ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def sweep(self) -> None:
        """Evict arguments from the device's cache, as in a step, and keep the device busy, so that launch latency is
        hidden. Uses only temporary memory; does nothing if there is none."""
        with contextlib.suppress(torch.OutOfMemoryError):
            if self.cache_bytes:
                torch.empty(_SWEPT * self.cache_bytes, dtype=torch.uint8, device=self.device).zero_()

    @functools.cached_property
    def cache_bytes(self) -> int:
        """Size of the last-level cache; 0 if unknown."""
        return int(getattr(self._properties(), "L2_cache_size", 0))

    def _properties(self) -> Any:
        return getattr(self.module, "get_device_properties", lambda device: None)(self.device)

    def timed_ns(self, call: Callable[[], Any]) -> int:
        """Time of ``call`` on the device's own clock."""
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(self.device)
        start.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        return round(start.elapsed_time(end) * 1e6)

    # --- random numbers --------------------------------------------------------------------------------------------

    def generator(self) -> torch.Generator:
        found = getattr(self.module, "default_generators", None)
        if not found:
            raise PlanError(
                f"torch.{self.device.type} has no default_generators, from which dropout could be drawn again."
            )
        return found[self.device.index]  # type: ignore[no-any-return]

"""PyTorch's allocators in one form for all devices: level, peak, granularity, and size of the device."""

from __future__ import annotations

import contextlib
import functools

import torch

from lowtide.device import Accelerator, interface_of
from lowtide.memory import cpu_allocator
from lowtide.memory.device_allocator import arena_room


class AcceleratorMeter:
    """The meter of an accelerator's allocator: bytes handed out, not reserved. Each measurement resets the allocator's
    own peak, but not ``peak_bytes``. The level counts tensors in an arena; the peak counts the whole arena."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._raised = 0
        _ = accelerator.granularity_bytes  # found by an allocation: do it before any window opens

    @property
    def level_bytes(self) -> int:
        return self.accelerator.allocated_bytes() - arena_room(self.accelerator)

    @property
    def peak_bytes(self) -> int:
        return max(self._raised, self.accelerator.peak_bytes())

    def reset_peak(self) -> int:
        self._raised = 0
        self.accelerator.reset_peak()
        return self.level_bytes

    def raise_peak(self, peak_bytes: int) -> None:
        self._raised = max(self._raised, peak_bytes)


class ReservedMeter:
    """The meter of memory that the CPU allocator takes: bytes handed out outside arenas, plus whole arenas."""

    def __init__(self, counter: cpu_allocator.AllocationCounter) -> None:
        self._counter = counter

    @property
    def level_bytes(self) -> int:
        return self._counter.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        return self._counter.reserved_peak_bytes

    def reset_peak(self) -> int:
        return self._counter.reset_reserved_peak()

    def raise_peak(self, peak_bytes: int) -> None:
        self._counter.raise_reserved_peak(peak_bytes)


# Level and peak of bytes handed out by an allocator. ``reset_peak`` sets the peak to the level, and returns it.
Meter = AcceleratorMeter | ReservedMeter | cpu_allocator.AllocationCounter


@functools.cache
def reserved_meter(counter: cpu_allocator.AllocationCounter) -> ReservedMeter:
    """The one meter for this counter, so that nested measurements know of each other."""
    return ReservedMeter(counter)


@functools.cache
def accelerator_meter(accelerator: Accelerator) -> AcceleratorMeter:
    """The one meter for this device, so that nested measurements know of each other."""
    return AcceleratorMeter(accelerator)


def meter_of(device: torch.device) -> Meter | None:
    """The meter for the device's allocator; ``None`` if this build of PyTorch or this kind of device has none."""
    if device.type == "cpu":
        return cpu_allocator.install()
    found = interface_of(device)
    return accelerator_meter(found) if isinstance(found, Accelerator) and found.has_statistics else None


def allocated_bytes(device: torch.device) -> int | None:
    """The bytes that PyTorch's allocator has handed out on ``device``, up to a constant; ``None`` if unknown."""
    meter = meter_of(device)
    return None if meter is None else meter.level_bytes


class PeakWindow(contextlib.AbstractContextManager["PeakWindow"]):
    """Measures the peak above the current level until ``close``. Windows can be nested, and closed in any order.

    ``peak_bytes`` and ``level_bytes`` are above ``start_bytes`` and have no meaning after ``close``.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._peak_before = meter.peak_bytes
        self.start_bytes = meter.reset_peak()
        _OPEN.append(self)

    @property
    def peak_bytes(self) -> int:
        return max([self.meter.peak_bytes, *(one._peak_before for one in self._later())]) - self.start_bytes

    @property
    def level_bytes(self) -> int:
        return self.meter.level_bytes - self.start_bytes

    def close(self) -> None:
        """End the window, so that windows opened before it see the peak they would have seen without it."""
        if self not in _OPEN:
            return
        later = self._later()
        if later:
            later[0]._peak_before = max(later[0]._peak_before, self._peak_before)
        else:
            self.meter.raise_peak(self._peak_before)
        _OPEN.remove(self)

    def _later(self) -> list[PeakWindow]:
        """Return the open windows of the same meter that were opened after this one."""
        own = [one for one in _OPEN if one.meter is self.meter]
        return own[own.index(self) + 1 :]

    def __exit__(self, *exception: object) -> None:
        self.close()


_OPEN: list[PeakWindow] = []


def round_up(nbytes: int, device: torch.device) -> int:
    """Return the bytes that the allocator hands out for a request: on the CPU the same, else a multiple of the granularity."""
    granularity = interface_of(device).granularity_bytes
    return nbytes if granularity == 1 else -(-nbytes // granularity) * granularity


def device_memory(device: torch.device) -> int | None:
    """Return the total bytes of ``device``, as far as that is known."""
    return interface_of(device).total_bytes()


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that could be allocated on ``device`` now, as far as that is known."""
    return interface_of(device).free_bytes()

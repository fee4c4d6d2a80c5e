"""PyTorch's allocators as everything here measures and limits them: level, peak, granularity, and what a device has."""

from __future__ import annotations

import contextlib
import functools
import os

import torch

from lowtide.memory import cpu_allocator

_CUDA_GRANULARITY_BYTES = 512


class CudaMeter:
    """Of the caching allocator of one device: bytes handed out, not those reserved.

    CUDA's own peak falls whenever something is measured, so ``torch.cuda.max_memory_allocated`` tells less than the truth
    afterwards; ``peak_bytes`` does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._raised = 0

    @staticmethod
    def of(device: torch.device) -> CudaMeter:
        """The one meter of a device, so that measurements inside each other know of each other."""
        return _cuda_meter(torch.cuda.current_device() if device.index is None else device.index)

    @property
    def level_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> int:
        return max(self._raised, torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> int:
        self._raised = 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.level_bytes

    def raise_peak(self, peak_bytes: int) -> None:
        self._raised = max(self._raised, peak_bytes)


class ReservedMeter:
    """Of the memory that the CPU's allocator takes up: what it has handed out outside of arenas, and all arenas."""

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


# Level and peak of the bytes that an allocator has handed out. ``reset_peak`` lowers the peak to the level, and returns it.
Meter = CudaMeter | ReservedMeter | cpu_allocator.AllocationCounter


@functools.cache
def reserved_meter(counter: cpu_allocator.AllocationCounter) -> ReservedMeter:
    """The one for a counter, so that measurements inside each other know of each other."""
    return ReservedMeter(counter)


@functools.cache
def _cuda_meter(index: int) -> CudaMeter:
    return CudaMeter(torch.device("cuda", index))


def meter_of(device: torch.device) -> Meter | None:
    """The meter of a CUDA device or of the CPU; ``None`` where this build of PyTorch allows none, or for another device."""
    if device.type == "cuda":
        return CudaMeter.of(device)
    return cpu_allocator.install() if device.type == "cpu" else None


def allocated_bytes(device: torch.device) -> int | None:
    """What PyTorch's allocator has handed out on ``device`` by now, up to a constant; ``None`` where that is not known."""
    meter = meter_of(device)
    return None if meter is None else meter.level_bytes


class PeakWindow(contextlib.AbstractContextManager["PeakWindow"]):
    """The peak from now on until ``close``, above the level of now. Windows can lie inside each other, and close in any order.

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
        """Windows that were opened before this one see what they would have seen without."""
        if self not in _OPEN:
            return
        later = self._later()
        if later:
            later[0]._peak_before = max(later[0]._peak_before, self._peak_before)
        else:
            self.meter.raise_peak(self._peak_before)
        _OPEN.remove(self)

    def _later(self) -> list[PeakWindow]:
        """Those of the same meter that were opened since."""
        own = [one for one in _OPEN if one.meter is self.meter]
        return own[own.index(self) + 1 :]

    def __exit__(self, *exception: object) -> None:
        self.close()


_OPEN: list[PeakWindow] = []


def round_up(nbytes: int, device: torch.device) -> int:
    """CUDA's caching allocator hands out multiples of 512 bytes; the CPU's what was asked for."""
    if device.type != "cuda":
        return nbytes
    return -(-nbytes // _CUDA_GRANULARITY_BYTES) * _CUDA_GRANULARITY_BYTES


def device_memory(device: torch.device) -> int | None:
    """Bytes that ``device`` has in all, as far as that is known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _pages("SC_PHYS_PAGES") if device.type == "cpu" else None


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated on ``device`` now, as far as that is known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return _pages("SC_AVPHYS_PAGES") if device.type == "cpu" else None


def _pages(name: str) -> int | None:
    """Bytes in that many pages of the system's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name) if hasattr(os, "sysconf") else None

"""The CPU. Its allocator has no statistics; ``memory.cpu_allocator`` counts bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import platform

from lowtide.device.interface import DeviceInterface


class Cpu(DeviceInterface):
    """The machine's memory and processors."""

    def name(self) -> str:
        """The processor and the number of cores that the process may use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"cpu {_processor()} {cores}"

    def total_bytes(self) -> int | None:
        return _pages("SC_PHYS_PAGES")

    def free_bytes(self) -> int | None:
        return _pages("SC_AVPHYS_PAGES")


def _pages(name: str) -> int | None:
    """The bytes of a number of pages that the system reports."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name) if hasattr(os, "sysconf") else None


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

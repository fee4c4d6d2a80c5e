"""The host's memory as second memory of an accelerator.

Copies run on two streams of their own, one each way, from and to pinned memory. The stream that computes never blocks the host
for them: it waits for events, in the order of the steps, so that memory is let go of after it was copied, and used after it was
filled, as the accelerator's allocator reuses memory in the order of that stream.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from lowtide.errors import ExecutionError
from lowtide.memory.allocators import free_memory
from lowtide.offload.interface import Copy, Lease, SecondMemoryOf, bytes_of
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)
_UNKNOWN = 2**50  # bytes, where the system does not tell how much is free


class HostMemory(SecondMemoryOf):
    """Pinned host memory as the second memory of ``device``, an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.home = torch.Stream(device), torch.Stream(device)
        self._lock = threading.Lock()
        self._free: deque[torch.Tensor] = deque()  # blocks that leases gave back

    def lease(self, nbytes: int) -> HostLease:
        with self._lock:
            blocks = sorted((self._free.popleft() for _ in range(len(self._free))), key=lambda one: one.nbytes)
            block = next((one for one in blocks if one.nbytes >= nbytes), None)
            if block is not None:
                self.out.wait_event(self.after(self.home))  # who had it may not have waited for what it fetched
                self._free.extend(one for one in blocks if one is not block)
            del blocks  # where none is large enough, they make room for one that is
        return HostLease(self, _pinned(nbytes) if block is None else block)

    def give_back(self, block: torch.Tensor) -> None:
        """Room for others. Takes no lock: the garbage collector calls it, in whatever a thread is doing."""
        self._free.append(block)

    def free_bytes(self) -> int:
        free = free_memory(torch.device("cpu"))
        return _UNKNOWN if free is None else free + sum(block.nbytes for block in [*self._free])

    def after(self, stream: torch.Stream) -> torch.Event:
        """Record and return an event at the current end of ``stream``."""
        event = torch.Event(self.device)
        event.record(stream)
        return event

    @property
    def computing(self) -> torch.Stream:
        """The stream on which operators run now."""
        return torch.accelerator.current_stream(self.device)


class HostLease(Lease):
    def __init__(self, memory: HostMemory, block: torch.Tensor) -> None:
        super().__init__(memory.give_back, block)
        self.memory, self.block = memory, block
        # What was fetched: from where to where, and when it had come.
        self.read: list[tuple[int, int, torch.Event]] = []

    def offload(self, offset: int, values: Sequence[torch.Tensor]) -> HostCopy:
        return HostCopy(self, offset, values)


class HostCopy(Copy):
    def __init__(self, lease: HostLease, offset: int, values: Sequence[torch.Tensor]) -> None:
        super().__init__(values)
        self._in: Any = None
        self._waits = False  # whether the device still fills what nobody has waited for
        memory = lease.memory
        self.lease, self.offset = lease, offset
        self.slot = lease.block[offset : offset + self.bytes]
        memory.out.wait_event(memory.after(memory.computing))
        before = [one for one in lease.read if one[0] < offset + self.bytes and offset < one[1]]  # what was in the slot
        for _, _, come in before:
            memory.out.wait_event(come)
        lease.read[:] = [one for one in lease.read if one not in before]  # whoever comes next waits for this one
        with memory.out:
            self.slot.copy_(bytes_of(values[0].untyped_storage()), non_blocking=True)
        self._out = memory.after(memory.out)

    def left(self) -> None:
        self.lease.memory.computing.wait_event(self._out)

    def _begin(self, storage: torch.UntypedStorage) -> None:
        memory = self.lease.memory
        memory.home.wait_event(memory.after(memory.computing))  # who had this memory before
        memory.home.wait_event(self._out)
        with memory.home:
            bytes_of(storage).copy_(self.slot, non_blocking=True)
        self._in = memory.after(memory.home)
        self._waits = True
        self.lease.read.append((self.offset, self.offset + self.bytes, self._in))

    def back(self) -> None:
        self.lease.memory.computing.wait_event(self._in)
        self._waits = False

    def __del__(self) -> None:
        if self._waits:  # a pass that was given up: nobody gets this memory before it was filled
            self.lease.memory.computing.wait_event(self._in)

    def settle(self) -> None:
        for event in (self._out, self._in):
            if event is not None:
                event.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    """Memory that the device reads and writes by itself; common memory where there is none, which the log says."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError) as error:
        _LOG.info("no pinned memory (%s): transfers go by common memory, which is slower", str(error).splitlines()[0])
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ExecutionError(
            f"the host has no {nbytes} bytes ({format_bytes(nbytes)}) for what a pass moves; give a smaller offload_budget=."
        ) from error

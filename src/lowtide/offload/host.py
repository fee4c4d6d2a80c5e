"""The host's memory as second memory of an accelerator.

Copies run on two streams of their own, one per direction, to and from pinned memory. The computing stream never blocks
the host for them. It waits for events, in the order of the steps, so that memory is freed after it was copied and used
after it was filled: the accelerator's allocator reuses memory in the order of that stream.
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
_UNKNOWN = 2**50  # bytes, if the system does not say how much is free


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
                self.out.wait_event(self.after(self.home))  # its last user may not have waited for a fetch
                self._free.extend(one for one in blocks if one is not block)
            del blocks  # if none is large enough, free them all
        return HostLease(self, _pinned(nbytes) if block is None else block)

    def give_back(self, block: torch.Tensor) -> None:
        """Return a block. Takes no lock, because the garbage collector may call it at any point in any thread."""
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
        # Ranges that were fetched, each with the event at which its copy ends.
        self.read: list[tuple[int, int, torch.Event]] = []

    def offload(self, offset: int, values: Sequence[torch.Tensor]) -> HostCopy:
        return HostCopy(self, offset, values)


class HostCopy(Copy):
    def __init__(self, lease: HostLease, offset: int, values: Sequence[torch.Tensor]) -> None:
        super().__init__(values)
        self._in: Any = None
        self._waits = False  # whether a fetch began that no code has waited for
        memory = lease.memory
        self.lease, self.offset = lease, offset
        self.slot = lease.block[offset : offset + self.bytes]
        memory.out.wait_event(memory.after(memory.computing))
        before = [one for one in lease.read if one[0] < offset + self.bytes and offset < one[1]]  # from this slot
        for _, _, come in before:
            memory.out.wait_event(come)
        lease.read[:] = [one for one in lease.read if one not in before]  # later copies wait for this one
        with memory.out:
            self.slot.copy_(bytes_of(values[0].untyped_storage()), non_blocking=True)
        self._out = memory.after(memory.out)

    def left(self) -> None:
        self.lease.memory.computing.wait_event(self._out)

    def _begin(self, storage: torch.UntypedStorage) -> None:
        memory = self.lease.memory
        memory.home.wait_event(memory.after(memory.computing))  # earlier users of this memory
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
        if self._waits:  # an abandoned pass: the memory is not reused before the copy ends
            self.lease.memory.computing.wait_event(self._in)

    def settle(self) -> None:
        for event in (self._out, self._in):
            if event is not None:
                event.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    """Pinned memory, which the device accesses directly; ordinary memory, noted in the log, if there is none."""
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

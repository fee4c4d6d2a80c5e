"""The interface of second memories to generated steps.

A pass leases room, and holds the lease as long as it lives. Each storage has a slot in it::

    copy = lease.offload(offset, (v1, v2))   # begins to copy the storage behind these values
    copy.left()                              # wait before its memory is freed or overwritten
    v1, v2 = copy.fetch()                    # new memory of the same layout, which begins to fill
    copy.back()                              # wait before it is read or written
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowtide.ir import Costs, Fetch, Offload, Schedule
from lowtide.place import Buffers, place

ALIGNMENT = 4096
"""Alignment of slots in bytes, as required for files that bypass the page cache."""


class Layout(NamedTuple):
    """Layout of a tensor in its storage, in elements."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor of this layout on another storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as a tensor of bytes."""
    return Layout(torch.uint8, 0, (storage.nbytes(),), (1,)).on(storage)


class Copy(abc.ABC):
    """A storage in the second memory, or on its way there or back."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        storage = values[0].untyped_storage()
        self.bytes = storage.nbytes()
        self.device = storage.device
        self.layouts = [Layout.of(value) for value in values]

    @abc.abstractmethod
    def left(self) -> None:
        """Wait until all bytes are copied out. Raises ``ExecutionError`` if they could not be written."""

    def fetch(self) -> list[torch.Tensor]:
        """Return the values in new memory, which begins to fill; they must not be used before ``back``."""
        # Not ``UntypedStorage(...)``, which uses another allocator on the CPU.
        storage = torch.empty(self.bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        self._begin(storage)
        return [layout.on(storage) for layout in self.layouts]

    @abc.abstractmethod
    def _begin(self, storage: torch.UntypedStorage) -> None:
        """Begin to fill ``storage``."""

    @abc.abstractmethod
    def back(self) -> None:
        """Wait until the most recent fetch is complete. Raises ``ExecutionError`` if the bytes could not be read, or are not
        those written."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Block the calling thread until no transfer is under way; for measurements."""


class Lease(abc.ABC):
    """Room in a second memory for one pass. It is returned by ``give_back(*arguments)`` when the lease and all its
    copies are gone."""

    def __init__(self, give_back: Callable[..., None], *arguments: object) -> None:
        weakref.finalize(self, give_back, *arguments).atexit = False

    @abc.abstractmethod
    def offload(self, offset: int, values: Sequence[torch.Tensor]) -> Copy:
        """Begin to copy the storage behind ``values`` to ``offset`` of the room."""


class SecondMemoryOf(abc.ABC):
    """A second memory of a device. ``shared``: whether both directions share the bandwidth and take turns."""

    shared = False

    @abc.abstractmethod
    def lease(self, nbytes: int) -> Lease:
        """Lease ``nbytes`` for a pass. Raises ``ExecutionError`` if there is no room."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes that the memory could still hold."""

    def identity(self) -> tuple[str, ...]:
        """Return what the bandwidth depends on besides name and device."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """The room that a pass of a schedule needs in a second memory: the slot of each storage that moves, and ``nbytes``
    in total. ``opened`` returns the memory of the current process, which may be a fork of the one that planned."""

    opened: Callable[[], SecondMemoryOf]
    slots: Mapping[int, int]
    nbytes: int

    def lease(self) -> Lease:
        """Lease room for one pass. Raises ``ExecutionError`` if there is none."""
        return self.opened().lease(self.nbytes)


def room_for(schedule: Schedule, costs: Costs, opened: Callable[[], SecondMemoryOf]) -> Room:
    """Assign slots to the storages that the schedule moves, in the memory that ``opened`` returns. Slots of storages
    that are there at the same time do not overlap."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Offload):
            first[step.storage] = index
        elif isinstance(step, Fetch):
            last[step.storage] = index
    moved = list(first)
    rows = [(first[one], last[one] + 1, int(costs.storage_bytes[one])) for one in moved]
    placement = place(Buffers.of(rows, ALIGNMENT), most_visits=1)
    return Room(opened, dict(zip(moved, placement.offsets.tolist(), strict=True)), placement.reserved_bytes)

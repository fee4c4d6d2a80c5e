"""A model of PyTorch's caching allocator for CUDA: its pools, segments and blocks, without a device and without torch.

Its rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` with their default settings.
Requests are rounded up to 512 bytes; requests up to 1 MiB have a pool, larger ones another. A pool hands out the smallest
free block that is large enough, of equal ones the lowest. It splits off the remainder if that is at least 512 bytes (small
pool) or more than 1 MiB (large pool). A freed block is merged with the free neighbours in its segment. If no block fits, the
pool takes a segment from the device: 2 MiB for small requests, 20 MiB for requests below 10 MiB, else the request rounded up
to 2 MiB. If the device has no room for it, all entirely free segments are given back, and the request is tried once more.

With expandable segments each pool has one segment. It grows by pages of 2 MiB (small pool) or 20 MiB (large pool), at its end
or where pages were given back; every remainder is split off, the block at the end is used last, and free pages are given back.

Not modelled: more than one stream, private pools of CUDA graphs, memory taken by other libraries, and the addresses that the
driver gives to segments. Here each segment lies above earlier ones, which decides between free blocks of equal size.
"""

from __future__ import annotations

import abc
import bisect
import itertools
from dataclasses import dataclass, field

_MIB = 1 << 20
BLOCK_BYTES = 512
SMALL_BYTES = _MIB
SMALL_SEGMENT_BYTES = 2 * _MIB
LARGE_SEGMENT_BYTES = 20 * _MIB
LARGE_REQUEST_BYTES = 10 * _MIB
ROUND_BYTES = 2 * _MIB
_ENDLESS = 1 << 80


@dataclass(slots=True)
class _Device:
    """A device with ``capacity`` bytes, of which ``taken`` are in use by segments; ``most`` is the peak of ``taken``."""

    capacity: int
    taken: int = 0
    most: int = 0

    def take(self, size: int) -> bool:
        """Take ``size`` bytes if there is room; return whether there was."""
        if self.taken + size > self.capacity:
            return False
        self.taken += size
        self.most = max(self.most, self.taken)
        return True

    def give_back(self, size: int) -> None:
        self.taken -= size


@dataclass(slots=True)
class _Pool(abc.ABC):
    """The free blocks of a pool. Segments never touch, so adjacent blocks always belong to one segment."""

    device: _Device
    small: bool
    by_size: list[tuple[int, int]] = field(default_factory=list)  # (size, address), in order
    sizes: dict[int, int] = field(default_factory=dict)  # address -> size
    ending: dict[int, int] = field(default_factory=dict)  # end -> address

    @abc.abstractmethod
    def least_remainder(self) -> int:
        """Return the smallest remainder of a block, in bytes, that is split off."""

    @abc.abstractmethod
    def grown(self, size: int) -> int | None:
        """Take memory from the device for a free block of at least ``size`` bytes. Returns its address; ``None`` if the device
        has no room."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Give back to the device all free memory that can be given back."""

    @abc.abstractmethod
    def segments(self) -> tuple[int, ...]:
        """Return the state of the pool when all its blocks are free: sizes (of expandable segments, holes) by address."""

    def request(self, size: int) -> tuple[int, int] | None:
        """Allocate a block for ``size`` bytes. Returns its address and actual size; ``None`` if the device has no room."""
        address = self.fitting(size)
        if address is None and (address := self.grown(size)) is None:
            return None
        there = self.remove(address)
        if there - size < self.least_remainder():
            return address, there
        self.add(address + size, there - size)
        return address, size

    def fitting(self, size: int) -> int | None:
        """Return the address of the smallest free block of at least ``size`` bytes, of equal ones the lowest."""
        place = bisect.bisect_left(self.by_size, (size, -1))
        return self.by_size[place][1] if place < len(self.by_size) else None

    def free(self, address: int, size: int) -> None:
        """Free the block and merge it with free neighbours on both sides."""
        if address in self.ending:
            before = self.ending[address]
            size, address = size + self.remove(before), before
        if address + size in self.sizes:
            size += self.remove(address + size)
        self.add(address, size)

    def add(self, address: int, size: int) -> None:
        bisect.insort(self.by_size, (size, address))
        self.sizes[address], self.ending[address + size] = size, address

    def remove(self, address: int) -> int:
        """Remove a block from the free ones. Returns its size."""
        size = self.sizes.pop(address)
        del self.ending[address + size]
        del self.by_size[bisect.bisect_left(self.by_size, (size, address))]
        return size


@dataclass(slots=True)
class _NativePool(_Pool):
    """A pool without expandable segments: takes a new segment for every request that finds no block."""

    taken: dict[int, int] = field(default_factory=dict)  # address of a segment -> its size, by address
    top: int = 0  # the address above all segments

    def least_remainder(self) -> int:
        return BLOCK_BYTES if self.small else SMALL_BYTES + 1

    def grown(self, size: int) -> int | None:
        segment = SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES
        if size >= LARGE_REQUEST_BYTES:
            segment = _rounded(size, ROUND_BYTES)
        if not self.device.take(segment):
            return None
        address, self.top = self.top, self.top + segment + BLOCK_BYTES
        self.taken[address] = segment
        self.add(address, segment)
        return address

    def give_back(self) -> None:
        for address in [each for each, size in self.taken.items() if self.sizes.get(each) == size]:
            self.remove(address)
            self.device.give_back(self.taken.pop(address))

    def segments(self) -> tuple[int, ...]:
        return tuple(self.taken.values())


@dataclass(slots=True)
class _ExpandablePool(_Pool):
    """A pool with one expandable segment. ``holes`` are its unmapped parts, as pairs of address and size in ascending order;
    the last one has no end."""

    holes: list[tuple[int, int]] = field(default_factory=lambda: [(0, _ENDLESS)])

    @property
    def page(self) -> int:
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES

    def least_remainder(self) -> int:
        return BLOCK_BYTES

    def fitting(self, size: int) -> int | None:
        """Return the smallest free block that is large enough, or the next larger one as long as that can grow to less. A block
        followed by a hole can grow by the size of the hole."""
        place, holes = bisect.bisect_left(self.by_size, (size, -1)), dict(self.holes)
        larger = ((there + holes.get(at + there, 0), at) for there, at in itertools.islice(self.by_size, place, None))
        grows_to, chosen = next(larger, (0, None))
        for other, address in larger:
            if other >= grows_to:
                break
            grows_to, chosen = other, address
        return chosen

    def grown(self, size: int) -> int | None:
        """Map pages at the lowest address at which adjoining free blocks and holes have ``size`` bytes together. If the device
        runs out of room on the way, the pages that were mapped stay mapped."""
        begins = (self.ending.get(hole, hole) for hole, _ in self.holes)
        address = next(begin for begin in begins if self._has_room(begin, size))
        while (there := self.sizes.get(address, 0)) < size:
            length = dict(self.holes)[address + there]
            if not self._map(address + there, _rounded(min(size - there, length), self.page)):
                return None
        return address

    def _has_room(self, begin: int, size: int) -> bool:
        lengths, end = self.sizes | dict(self.holes), begin
        while end - begin < size and end in lengths:
            end += lengths[end]
        return end - begin >= size

    def _map(self, hole: int, size: int) -> bool:
        """Map the first ``size`` bytes of a hole, whole pages. Returns whether the device had room."""
        if not self.device.take(size):
            return False
        place = bisect.bisect_left(self.holes, (hole, 0))
        length = self.holes[place][1]
        self.holes[place : place + 1] = [(hole + size, length - size)] if length > size else []
        self.free(hole, size)
        return True

    def give_back(self) -> None:
        """Unmap all pages that lie entirely in a free block."""
        for address, size in list(self.sizes.items()):
            first, last = _rounded(address, self.page), (address + size) // self.page * self.page
            if first >= last:
                continue
            self.remove(address)
            for begin, end in ((address, first), (last, address + size)):
                if begin < end:
                    self.add(begin, end - begin)
            self.device.give_back(last - first)
            self.holes.append((first, last - first))
        self.holes.sort()
        joined: list[tuple[int, int]] = []
        for address, size in self.holes:
            if joined and sum(joined[-1]) == address:
                address, before = joined.pop()
                size += before
            joined.append((address, size))
        self.holes = joined

    def segments(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(self.holes))


class CachingAllocator:
    """The allocator of a device with ``capacity`` bytes (``None``: without a limit), by the rules in the module's docstring.

    ``reserved_bytes``: memory taken from the device; ``allocated_bytes``: memory handed out, in whole blocks; with ``max_``,
    the peak of each so far.
    """

    def __init__(self, capacity: int | None = None, *, expandable_segments: bool = False) -> None:
        self._device = _Device(_ENDLESS if capacity is None else capacity)
        kind = _ExpandablePool if expandable_segments else _NativePool
        self._pools = {small: kind(self._device, small) for small in (True, False)}
        self.allocated_bytes = self.max_allocated_bytes = 0
        self._sizes: dict[tuple[bool, int], int] = {}

    @property
    def reserved_bytes(self) -> int:
        return self._device.taken

    @property
    def max_reserved_bytes(self) -> int:
        return self._device.most

    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Return the memory that each pool has of the device, as numbers that are equal only for equal states."""
        return tuple(pool.segments() for pool in self._pools.values())

    def allocate(self, size: int) -> tuple[bool, int] | None:
        """Allocate ``size`` bytes, at least 1. Returns whether the block is in the small pool, and its address there. ``None``
        if the device has no room, even after cached free memory was given back."""
        rounded = _rounded(size, BLOCK_BYTES)
        small = rounded <= SMALL_BYTES
        block = self._pools[small].request(rounded)
        if block is None:
            for pool in self._pools.values():
                pool.give_back()
            block = self._pools[small].request(rounded)
        if block is None:
            return None
        address, there = block
        self._sizes[small, address] = there
        self.allocated_bytes += there
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return small, address

    def free(self, block: tuple[bool, int]) -> None:
        """Free a ``block`` that ``allocate`` returned."""
        size = self._sizes.pop(block)
        self.allocated_bytes -= size
        self._pools[block[0]].free(block[1], size)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit

"""PyTorch's caching allocator for CUDA, as a model: the blocks of pools, without a device and without torch.

What it does, after ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` with their default settings:
requests are rounded up to 512 bytes; those up to 1 MiB and larger ones have a pool each. A pool hands out the smallest free
block that is large enough, the lowest of several, and splits off what is left over: of small blocks from 512 bytes on, of large
ones where it is more than 1 MiB. A freed block becomes one with the free neighbours of its segment. Where no block fits, a
segment is taken from the device: 2 MiB for small requests, 20 MiB for those below 10 MiB, else the request rounded up to 2 MiB.
Where the device has no room for it, all segments that are free as a whole go back, and it is asked once more.

With expandable segments a pool has one segment, which grows by pages of 2 MiB or 20 MiB at its end, or where pages were given
back; every remainder is split off, the block at the end is used last, and what goes back are free pages.

Not in the model: streams other than one, private pools of CUDA graphs, what other libraries take, and where the driver puts a
segment: here it lies above those before it, which decides between free blocks of one size.
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
    """Of ``capacity`` bytes, of which ``taken`` are given away, ``most`` at one time."""

    capacity: int
    taken: int = 0
    most: int = 0

    def take(self, size: int) -> bool:
        """Whether there is room for ``size`` bytes, which are taken then."""
        if self.taken + size > self.capacity:
            return False
        self.taken += size
        self.most = max(self.most, self.taken)
        return True

    def give_back(self, size: int) -> None:
        self.taken -= size


@dataclass(slots=True)
class _Pool(abc.ABC):
    """Free blocks of ``device``. Segments do not touch, so that blocks side by side are of one segment."""

    device: _Device
    small: bool
    by_size: list[tuple[int, int]] = field(default_factory=list)  # (size, address), in order
    sizes: dict[int, int] = field(default_factory=dict)  # address -> size
    ending: dict[int, int] = field(default_factory=dict)  # end -> address

    @abc.abstractmethod
    def least_remainder(self) -> int:
        """Bytes from which on what is left of a block is split off."""

    @abc.abstractmethod
    def grown(self, size: int) -> int | None:
        """The address of a free block of at least ``size`` bytes, some taken for it; ``None`` where the device has no room."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """What is free and can go back to the device does."""

    @abc.abstractmethod
    def segments(self) -> tuple[int, ...]:
        """All that decides what happens next where everything is free: sizes in the order of their addresses."""

    def request(self, size: int) -> tuple[int, int] | None:
        """Address and size of a block for ``size`` bytes, which is free no more; ``None`` where the device has no room."""
        address = self.fitting(size)
        if address is None and (address := self.grown(size)) is None:
            return None
        there = self.remove(address)
        if there - size < self.least_remainder():
            return address, there
        self.add(address + size, there - size)
        return address, size

    def fitting(self, size: int) -> int | None:
        """The address of the smallest free block of at least ``size`` bytes, of several the lowest."""
        place = bisect.bisect_left(self.by_size, (size, -1))
        return self.by_size[place][1] if place < len(self.by_size) else None

    def free(self, address: int, size: int) -> None:
        """The block becomes free, one with what is free on both sides."""
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
        """Returns its size."""
        size = self.sizes.pop(address)
        del self.ending[address + size]
        del self.by_size[bisect.bisect_left(self.by_size, (size, address))]
        return size


@dataclass(slots=True)
class _NativePool(_Pool):
    """A segment for every request that finds no block."""

    taken: dict[int, int] = field(default_factory=dict)  # address -> size, by address
    top: int = 0  # above all segments

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
    """One segment, parts of which are mapped. ``holes``, as pairs of address and size in order, are those that are not; the
    last one has no end."""

    holes: list[tuple[int, int]] = field(default_factory=lambda: [(0, _ENDLESS)])

    @property
    def page(self) -> int:
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES

    def least_remainder(self) -> int:
        return BLOCK_BYTES

    def fitting(self, size: int) -> int | None:
        """The first that is large enough, in the order of the sizes, but for larger ones that come next and can grow to less: a
        block in front of a hole counts with the hole."""
        place, holes = bisect.bisect_left(self.by_size, (size, -1)), dict(self.holes)
        larger = ((there + holes.get(at + there, 0), at) for there, at in itertools.islice(self.by_size, place, None))
        grows_to, chosen = next(larger, (0, None))
        for other, address in larger:
            if other >= grows_to:
                break
            grows_to, chosen = other, address
        return chosen

    def grown(self, size: int) -> int | None:
        """At the lowest address where free blocks and holes that adjoin have ``size`` bytes together. What could be mapped
        stays so, also where the device has no room for the rest."""
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
        """Maps the first ``size`` bytes of a hole, whole pages; whether the device had them."""
        if not self.device.take(size):
            return False
        place = bisect.bisect_left(self.holes, (hole, 0))
        length = self.holes[place][1]
        self.holes[place : place + 1] = [(hole + size, length - size)] if length > size else []
        self.free(hole, size)
        return True

    def give_back(self) -> None:
        """Of every free block the pages that lie in it as a whole."""
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
    """Memory of a device with ``capacity`` bytes (``None``: as many as are asked for), by the rules above.

    ``reserved_bytes`` is what it has of the device and ``allocated_bytes`` what it has handed out, in whole blocks; with
    ``max_`` the most of each so far.
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
        """Of each pool what it has of the device, as numbers that are the same only where it is."""
        return tuple(pool.segments() for pool in self._pools.values())

    def allocate(self, size: int) -> tuple[bool, int] | None:
        """A block for ``size`` bytes, at least 1: whether it is a small one, and its address in the pool of these. ``None``
        where the device has no room for it, even after what is free went back to it."""
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
        """What ``allocate`` returned."""
        size = self._sizes.pop(block)
        self.allocated_bytes -= size
        self._pools[block[0]].free(block[1], size)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit

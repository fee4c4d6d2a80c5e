"""The model of CUDA's caching allocator: worked by hand, against another one that is written as lists that are searched, and
that nothing is lost or handed out twice."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lowtide.ir import keep_all_schedule, load_instance, simulate
from lowtide.place import Buffers, CachingAllocator, CudaMemory, cuda_memory, smallest_device, train
from lowtide.place.schedule import buffers_of
from tests.place.instances import Row
from tests.solve.small_graphs import small_graph
from tests.support.wide import seeds

KIB, MIB = 1 << 10, 1 << 20
NATIVE_AND_EXPANDABLE = pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])


def reserved(sizes: list[int], **options: bool) -> tuple[int, int]:
    """Bytes reserved and allocated after requests of ``sizes``."""
    allocator = CachingAllocator(**options)
    for size in sizes:
        assert allocator.allocate(size) is not None
    assert (allocator.max_reserved_bytes, allocator.max_allocated_bytes) == (
        allocator.reserved_bytes,
        allocator.allocated_bytes,
    )
    return allocator.reserved_bytes, allocator.allocated_bytes


@pytest.mark.parametrize(
    ("sizes", "native", "expandable"),
    [
        ([1], (2 * MIB, 512), (2 * MIB, 512)),
        ([512, 513], (2 * MIB, 1536), (2 * MIB, 1536)),
        ([MIB, MIB], (2 * MIB, 2 * MIB), (2 * MIB, 2 * MIB)),
        ([MIB, MIB, 1], (4 * MIB, 2 * MIB + 512), (4 * MIB, 2 * MIB + 512)),
        ([MIB + 1], (20 * MIB, MIB + 512), (20 * MIB, MIB + 512)),
        # below 10 MiB, two share 20 MiB; what is left of 1 KiB is split off with expandable segments alone
        ([10 * MIB - 512, 10 * MIB - 512], (20 * MIB, 20 * MIB), (20 * MIB, 20 * MIB - 1 * KIB)),
        ([9 * MIB, 11 * MIB], (20 * MIB, 20 * MIB), (20 * MIB, 20 * MIB)),
        ([9 * MIB, 11 * MIB + 1], (32 * MIB, 21 * MIB), (40 * MIB, 20 * MIB + 512)),
        # 10 MiB and more are rounded up to 2 MiB; a remainder of 1 MiB is not split off, and counts as handed out
        ([10 * MIB], (10 * MIB, 10 * MIB), (20 * MIB, 10 * MIB)),
        ([10 * MIB - 1], (10 * MIB, 10 * MIB), (20 * MIB, 10 * MIB)),
        ([11 * MIB], (12 * MIB, 12 * MIB), (20 * MIB, 11 * MIB)),
        ([11 * MIB - 512], (12 * MIB, 11 * MIB - 512), (20 * MIB, 11 * MIB - 512)),
        ([30 * MIB, 15 * MIB], (46 * MIB, 46 * MIB), (60 * MIB, 45 * MIB)),
        # of both pools
        ([3 * MIB, 3], (22 * MIB, 3 * MIB + 512), (22 * MIB, 3 * MIB + 512)),
    ],
)
def test_by_hand(sizes: list[int], native: tuple[int, int], expandable: tuple[int, int]) -> None:
    assert reserved(sizes) == native
    assert reserved(sizes, expandable_segments=True) == expandable


def test_the_smallest_block_that_fits_is_used_and_the_lowest_of_several() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * KIB) for size in (300, 100, 200, 100, 100, 100)]
    assert [block and block[1] // KIB for block in blocks] == [0, 300, 400, 600, 700, 800]
    for place in (0, 4, 2):
        allocator.free(blocks[place] or (True, 0))
    assert allocator.allocate(100 * KIB) == (True, 700 * KIB)
    assert allocator.allocate(150 * KIB) == (True, 400 * KIB)
    assert allocator.allocate(50 * KIB) == (True, 550 * KIB)
    assert allocator.allocate(250 * KIB) == (True, 0)


def test_what_is_cached_goes_back_before_a_request_fails() -> None:
    allocator = CachingAllocator(40 * MIB)
    first, second = allocator.allocate(20 * MIB), allocator.allocate(12 * MIB)
    assert first is not None and second is not None
    allocator.free(first)
    assert allocator.allocate(30 * MIB) is None  # the 20 MiB went back, but 12 are in use
    assert allocator.reserved_bytes == 12 * MIB
    assert allocator.allocate(28 * MIB) is not None
    assert allocator.reserved_bytes == allocator.max_reserved_bytes == 40 * MIB


def test_a_segment_that_is_cut_up_stays_but_free_pages_go_back() -> None:
    for expandable in (False, True):
        allocator = CachingAllocator(80 * MIB, expandable_segments=expandable)
        large = allocator.allocate(60 * MIB)
        assert large is not None and allocator.reserved_bytes == 60 * MIB
        allocator.free(large)
        assert allocator.allocate(4 * MIB) == large
        assert (allocator.allocate(59 * MIB) is not None) == expandable
        assert allocator.reserved_bytes == (80 if expandable else 60) * MIB


@dataclass
class Reference:
    """The same rules on runs of memory in lists, ``[bytes, who]``, where ``who`` is a request, or ``FREE`` or ``HOLE``."""

    capacity: int
    expandable: bool
    FREE, HOLE = "free", "hole"
    segments: dict[bool, list[list[list[object]]]] = field(default_factory=lambda: {True: [], False: []})

    def __post_init__(self) -> None:
        if self.expandable:
            self.segments = {small: [[[1 << 60, self.HOLE]]] for small in (True, False)}

    def total(self, *left_out: str) -> int:
        runs = (run for kind in self.segments.values() for segment in kind for run in segment)
        return sum(int(str(size)) for size, who in runs if who not in left_out)

    @property
    def reserved_bytes(self) -> int:
        return self.total(self.HOLE)

    @property
    def allocated_bytes(self) -> int:
        return self.total(self.HOLE, self.FREE)

    def allocate(self, size: int, who: str) -> bool:
        size = (size + 511) // 512 * 512
        small = size <= MIB
        for attempt in (1, 2):
            found = self._best(size, small) or self._grow(size, small)
            if found is not None:
                segment, place = found
                left = _int(segment[place][0]) - size
                if left >= 512 if small or self.expandable else left > MIB:
                    segment[place : place + 1] = [[size, who], [left, self.FREE]]
                else:
                    segment[place][1] = who
                return True
            if attempt == 1:
                self._release()
        return False

    def free(self, who: str) -> None:
        for segment in (each for kind in self.segments.values() for each in kind):
            for run in segment:
                if run[1] == who:
                    run[1] = self.FREE
            _join(segment)

    def _best(self, size: int, small: bool) -> tuple[list[list[object]], int] | None:
        free = []
        for number, segment in enumerate(self.segments[small]):
            for place, (there, who) in enumerate(segment):
                if who == self.FREE and _int(there) >= size:
                    after = segment[place + 1] if place + 1 < len(segment) else [0, ""]
                    hole = _int(after[0]) if after[1] == self.HOLE else 0
                    free.append((_int(there), number, place, _int(there) + hole))
        free.sort()
        while len(free) > 1 and free[1][3] < free[0][3]:
            free.pop(0)
        return (self.segments[small][free[0][1]], free[0][2]) if free else None

    def _grow(self, size: int, small: bool) -> tuple[list[list[object]], int] | None:
        if not self.expandable:
            segment_size = (
                2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            if self.reserved_bytes + segment_size > self.capacity:
                return None
            self.segments[small].append([[segment_size, self.FREE]])
            return self.segments[small][-1], 0
        (segment,), page = self.segments[small], (2 if small else 20) * MIB
        for place, run in enumerate(segment):
            if run[1] != self.HOLE:
                continue
            start = place - 1 if place and segment[place - 1][1] == self.FREE else place
            room, at = 0, start
            while at < len(segment) and segment[at][1] in (self.FREE, self.HOLE) and room < size:
                room, at = room + _int(segment[at][0]), at + 1
            if room < size:
                continue
            while segment[start][1] != self.FREE or _int(segment[start][0]) < size:
                hole = start if segment[start][1] == self.HOLE else start + 1
                missing = size if hole == start else size - _int(segment[start][0])
                pages = (min(missing, _int(segment[hole][0])) + page - 1) // page * page
                if self.reserved_bytes + pages > self.capacity:
                    return None
                segment[hole : hole + 1] = [[pages, self.FREE], [_int(segment[hole][0]) - pages, self.HOLE]]
                _join(segment)
            return segment, start
        raise AssertionError("the last hole has no end")

    def _release(self) -> None:
        if not self.expandable:
            for small, kind in self.segments.items():
                self.segments[small] = [segment for segment in kind if segment[0][1] != self.FREE or len(segment) > 1]
            return
        for small, (segment,) in self.segments.items():
            page, at, cut = (2 if small else 20) * MIB, 0, []
            for size, who in segment:
                first, last = -(-at // page) * page, (at + _int(size)) // page * page
                if who == self.FREE and first < last:
                    cut += [[first - at, who], [last - first, self.HOLE], [at + _int(size) - last, who]]
                else:
                    cut.append([size, who])
                at += _int(size)
            segment[:] = cut
            _join(segment)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _join(segment: list[list[object]]) -> None:
    """Free runs that adjoin are one, holes too, and none is empty."""
    joined: list[list[object]] = []
    for size, who in segment:
        if not size:
            continue
        if joined and joined[-1][1] == who and who in (Reference.FREE, Reference.HOLE):
            joined[-1][0] = _int(joined[-1][0]) + _int(size)
        else:
            joined.append([size, who])
    segment[:] = joined


def random_size(draw: random.Random) -> int:
    """Often on an edge of the rules."""
    edge = draw.choice([512, 4 * KIB, 300 * KIB, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 19 * MIB, 20 * MIB, 33 * MIB])
    return max(1, draw.choice([edge, edge, edge - 512, edge + 512, draw.randint(1, edge)]) + draw.randint(-1, 1))


@NATIVE_AND_EXPANDABLE
@pytest.mark.parametrize("seed", seeds(12, 40))
def test_as_the_reference_does(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    capacity = draw.choice([60, 100, 130, 1 << 20]) * MIB
    allocator, reference = CachingAllocator(capacity, expandable_segments=expandable), Reference(capacity, expandable)
    held: dict[str, tuple[bool, int]] = {}
    refused = 0
    for step in range(120):
        if held and draw.random() < 0.45:
            name = draw.choice(sorted(held))
            allocator.free(held.pop(name))
            reference.free(name)
        else:
            size = random_size(draw)
            block = allocator.allocate(size)
            assert (block is not None) == reference.allocate(size, str(step))
            if block is not None:
                held[str(step)] = block
            refused += block is None
        assert allocator.allocated_bytes == reference.allocated_bytes
        assert allocator.reserved_bytes == reference.reserved_bytes
    assert refused or capacity > 60 * MIB


@NATIVE_AND_EXPANDABLE
@pytest.mark.parametrize("seed", seeds(8, 20))
def test_nothing_is_lost_or_handed_out_twice(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    capacity = draw.choice([100, 1 << 20]) * MIB
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    held: dict[tuple[bool, int], int] = {}
    for _ in range(150):
        if held and draw.random() < 0.45:
            block = draw.choice(sorted(held))
            allocator.free(block)
            del held[block]
        else:
            size = random_size(draw)
            new = allocator.allocate(size)
            if new is not None:
                assert new[0] == (size <= MIB)
                same = [(at, end) for (small, at), end in held.items() if small == new[0]]
                assert all(new[1] + size <= at or at + end <= new[1] for at, end in same)
                held[new] = size
        asked = sum(held.values())
        assert asked <= allocator.allocated_bytes <= allocator.reserved_bytes <= capacity
        assert allocator.allocated_bytes <= asked + len(held) * (MIB + 511)
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    # Segments and pages are whole again, so that one more byte than there is room for takes all of them back.
    assert allocator.allocate(capacity + 1) is None
    assert allocator.reserved_bytes == 0


@NATIVE_AND_EXPANDABLE
@pytest.mark.parametrize("seed", seeds(6, 12))
def test_the_smallest_device(seed: int, expandable: bool) -> None:
    """On it and on every larger one there is room, on those of one byte less there is none: tried on all that differ."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for _ in range(40):
        lower = draw.randint(0, 30)
        rows.append((lower, lower + draw.randint(1, 12), random_size(draw)))
    buffers = Buffers.of(rows)
    endless = CachingAllocator(expandable_segments=expandable)
    assert train(buffers, endless)
    least = smallest_device(buffers, expandable_segments=expandable)
    assert buffers.load_bytes <= least <= endless.max_reserved_bytes

    def runs(capacity: int) -> bool:
        return train(buffers, CachingAllocator(capacity, expandable_segments=expandable))

    assert not runs(least - 1)
    assert all(runs(capacity) for capacity in range(least, endless.max_reserved_bytes + 4 * MIB, 2 * MIB))


def test_a_second_step_may_take_more_than_the_first() -> None:
    """The first takes 20 MiB for 4 and 9, and 12 for 12. In the second, 4 are cut out of those 12, the smallest that fits."""
    buffers = Buffers.of([(0, 2, 4 * MIB), (0, 2, 9 * MIB), (1, 3, 12 * MIB)])
    allocator = CachingAllocator()
    assert all(allocator.allocate(size) for size in buffers.size.tolist())
    assert allocator.reserved_bytes == 32 * MIB
    allocator = CachingAllocator()
    assert train(buffers, allocator)
    assert allocator.max_reserved_bytes == 44 * MIB
    assert allocator.allocated_bytes == 0
    assert smallest_device(buffers) == 44 * MIB


@NATIVE_AND_EXPANDABLE
@pytest.mark.parametrize("seed", range(10))
def test_of_a_schedule(seed: int, expandable: bool) -> None:
    """Small graphs whose bytes are stretched; what is resident throughout has memory of its own."""
    graph, costs = small_graph(seed, ops=8)
    costs = dataclasses.replace(
        costs, storage_bytes=costs.storage_bytes * 3 * MIB, workspace_bytes=costs.workspace_bytes * MIB
    )
    graph = dataclasses.replace(graph, fixed_bytes=7)
    schedule = keep_all_schedule(graph)
    peak = simulate(graph, costs, schedule).peak_bytes
    found = cuda_memory(graph, costs, schedule, expandable_segments=expandable)
    assert peak <= found.allocated_bytes <= found.reserved_bytes
    assert peak <= found.smallest_device_bytes <= found.reserved_bytes
    assert found.fragmentation == 1 - found.allocated_bytes / found.reserved_bytes
    buffers, _ = buffers_of(schedule, simulate(graph, costs, schedule).allocations, 1)
    assert smallest_device(buffers, expandable_segments=expandable) == found.smallest_device_bytes - 7
    assert all((bytes_ - 7) % (2 * MIB) == 0 for bytes_ in (found.reserved_bytes, found.smallest_device_bytes))


def test_of_nothing() -> None:
    """No bytes take no segment."""
    assert smallest_device(Buffers.of([])) == smallest_device(Buffers.of([(0, 1, 0)])) == 0
    assert CudaMemory(0, 0, 0).fragmentation == 0


def test_a_plan_of_a_transformer() -> None:
    graph, costs = load_instance(Path(__file__).parents[2] / "benchmarks" / "graphs" / "gpt2_2.json")
    schedule = keep_all_schedule(graph)
    native, expandable = (cuda_memory(graph, costs, schedule, expandable_segments=each) for each in (False, True))
    peak = simulate(graph, costs, schedule).peak_bytes
    for found in (native, expandable):
        assert peak <= found.smallest_device_bytes < found.reserved_bytes < 1.1 * peak
        assert found.allocated_bytes < 1.001 * peak

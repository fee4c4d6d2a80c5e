"""What a step takes of a CUDA device, under PyTorch's caching allocator: its allocations replayed through the model of it."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir import Costs, Graph, Schedule, simulate
from lowtide.place.buffers import Buffers
from lowtide.place.caching import CachingAllocator
from lowtide.place.schedule import buffers_of

STEPS = 10
"""The most that are replayed, for segments that do not settle before."""


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """What training takes of a CUDA device for its steps.

    ``reserved_bytes`` and ``allocated_bytes``: what ``torch.cuda.max_memory_reserved`` and ``max_memory_allocated`` would say
    on a device with room for whatever is asked. With ``smallest_device_bytes``, and with any more, the allocator gives back
    what it has cached in time and the steps run; with one byte less they run out of memory. All are beside what the device
    holds before: the context, parameters, what an optimizer keeps.
    """

    reserved_bytes: int
    allocated_bytes: int
    smallest_device_bytes: int

    @property
    def fragmentation(self) -> float:
        """The share of ``reserved_bytes`` that is handed out at no time: where most is, so much is left over."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def cuda_memory(graph: Graph, costs: Costs, schedule: Schedule, *, expandable_segments: bool = False) -> CudaMemory:
    """Of a valid schedule. What is resident throughout (``fixed_bytes``) has memory of its own, which is counted."""
    buffers, _ = buffers_of(schedule, simulate(graph, costs, schedule).allocations, 1)
    endless = CachingAllocator(expandable_segments=expandable_segments)
    train(buffers, endless)
    fixed = graph.fixed_bytes
    return CudaMemory(
        endless.max_reserved_bytes + fixed,
        endless.max_allocated_bytes + fixed,
        smallest_device(buffers, expandable_segments=expandable_segments) + fixed,
    )


def train(buffers: Buffers, allocator: CachingAllocator) -> bool:
    """Allocate and free ``buffers`` as their lifetimes say, step after step: a step may take more of the device than those
    before, whose segments it cuts up otherwise. Ends where the segments are those that an earlier step left, so that all is
    known, or after ``STEPS``. What outlives a step is freed before the next, as gradients are. Returns whether the device had
    room for all; the first request for which it has none ends it too."""
    events, known = _events(buffers), set[tuple[tuple[int, ...], ...]]()
    while len(known) < STEPS and allocator.segments() not in known:
        known.add(allocator.segments())
        held = dict[int, tuple[bool, int]]()
        for comes, position, size in events:
            if not comes:
                allocator.free(held.pop(position))
                continue
            block = allocator.allocate(size)
            if block is None:
                return False
            held[position] = block
    return True


def smallest_device(buffers: Buffers, *, expandable_segments: bool = False) -> int:
    """The least capacity such that ``train`` has room on every device of that many bytes or more.

    More capacity is not always better, since what is given back decides where the rest goes; so capacities are gone through
    from above. What happens depends on the capacity by its refusals alone: where at most ``m`` bytes were taken, the same
    happens on a device of ``m``, and the next to look at has one byte less.
    """
    least, fits = CachingAllocator(expandable_segments=expandable_segments), True
    train(buffers, least)
    while fits and least.max_reserved_bytes:
        lower = CachingAllocator(least.max_reserved_bytes - 1, expandable_segments=expandable_segments)
        fits = train(buffers, lower)
        least = lower if fits else least
    return least.max_reserved_bytes


def _events(buffers: Buffers) -> list[tuple[bool, int, int]]:
    """Whether it comes or goes, which buffer, and its bytes. What goes at a time makes room for what comes at it, in order."""
    times = [(time, True, i) for i, time in enumerate(buffers.lower.tolist())]
    times += [(time, False, i) for i, time in enumerate(buffers.upper.tolist())]
    sizes = buffers.size.tolist()
    return [(comes, i, sizes[i]) for _, comes, i in sorted(times) if sizes[i]]

"""Memory that a training step takes of a CUDA device: its allocations replayed in a model of PyTorch's caching allocator."""

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
    """Memory of a CUDA device that training steps take.

    ``reserved_bytes`` and ``allocated_bytes``: what ``torch.cuda.max_memory_reserved`` and ``max_memory_allocated`` would
    report on a device with unlimited memory. ``smallest_device_bytes``: on a device with at least this much the steps run,
    since the allocator gives back cached memory in time; with one byte less they run out of memory. None of them includes
    memory in use before the step: the CUDA context, parameters, optimizer states.
    """

    reserved_bytes: int
    allocated_bytes: int
    smallest_device_bytes: int

    @property
    def fragmentation(self) -> float:
        """The share of ``reserved_bytes`` that is not allocated even when the most is."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def cuda_memory(graph: Graph, costs: Costs, schedule: Schedule, *, expandable_segments: bool = False) -> CudaMemory:
    """Simulate the CUDA memory of a valid schedule. ``fixed_bytes``, resident throughout, are added to all results."""
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
    """Replay training steps: allocate and free ``buffers`` as their lifetimes say, step after step. A step may take more memory
    than earlier ones, as it splits their segments in other ways. Stops when a step leaves the same segments as an earlier
    one, since all repeats from there, or after ``STEPS``. Buffers that outlive a step are freed before the next, as gradients
    are. Returns whether the device had room for all requests; stops at the first that it had no room for."""
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
    """Return the least capacity such that ``train`` has room on every device of at least that many bytes.

    More capacity is not always better, since the memory that is given back decides where later blocks go; so capacities are
    tried in descending order. The capacity matters only when a request is refused: a run that took at most ``m`` bytes is the
    same on a device of ``m`` bytes, so the next capacity to try is ``m - 1``.
    """
    least, fits = CachingAllocator(expandable_segments=expandable_segments), True
    train(buffers, least)
    while fits and least.max_reserved_bytes:
        lower = CachingAllocator(least.max_reserved_bytes - 1, expandable_segments=expandable_segments)
        fits = train(buffers, lower)
        least = lower if fits else least
    return least.max_reserved_bytes


def _events(buffers: Buffers) -> list[tuple[bool, int, int]]:
    """Return events as (starts, buffer, bytes) in order of time. Of events at one time, ends come first."""
    times = [(time, True, i) for i, time in enumerate(buffers.lower.tolist())]
    times += [(time, False, i) for i, time in enumerate(buffers.upper.tolist())]
    sizes = buffers.size.tolist()
    return [(comes, i, sizes[i]) for _, comes, i in sorted(times) if sizes[i]]

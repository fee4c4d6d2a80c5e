"""Memory placement: give buffers with lifetimes their offsets in one block of memory. No torch."""

from lowtide.place.budget import PlacedSolution, solve_placed
from lowtide.place.buffers import Buffers
from lowtide.place.caching import CachingAllocator
from lowtide.place.checker import fault
from lowtide.place.cuda import CudaMemory, cuda_memory, smallest_device, train
from lowtide.place.files import read_buffers, write_buffers
from lowtide.place.placement import MOST_VISITS, Placement, place
from lowtide.place.schedule import ACCELERATOR_ALIGNMENT, CPU_ALIGNMENT, Layout, lay_out

__all__ = [
    "ACCELERATOR_ALIGNMENT",
    "CPU_ALIGNMENT",
    "MOST_VISITS",
    "Buffers",
    "CachingAllocator",
    "CudaMemory",
    "Layout",
    "PlacedSolution",
    "Placement",
    "cuda_memory",
    "fault",
    "lay_out",
    "place",
    "read_buffers",
    "smallest_device",
    "solve_placed",
    "train",
    "write_buffers",
]

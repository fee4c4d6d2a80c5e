"""Placement: from buffers with lifetimes to offsets in one block of memory. No torch."""

from lowtide.place.budget import PlacedSolution, solve_placed
from lowtide.place.buffers import Buffers
from lowtide.place.checker import fault
from lowtide.place.files import read_buffers, write_buffers
from lowtide.place.placement import MOST_VISITS, Placement, place
from lowtide.place.schedule import DEVICE_ALIGNMENT, Layout, lay_out

__all__ = [
    "DEVICE_ALIGNMENT",
    "MOST_VISITS",
    "Buffers",
    "Layout",
    "PlacedSolution",
    "Placement",
    "fault",
    "lay_out",
    "place",
    "read_buffers",
    "solve_placed",
    "write_buffers",
]

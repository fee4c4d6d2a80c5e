"""Lay out a schedule: give every allocation that the simulator counts an offset in one block of memory.

Tensors, second copies, workspaces and saved generator states are buffers; time is counted in steps. A tensor that overwrites
another takes its place, so the two are one buffer. ``fixed_bytes``, resident throughout, get no offset but count as reserved,
outside the block. So do the storages ``apart`` that the caller names: those that others allocate or that outlive the step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.ir import Allocation, Compute, Costs, Fetch, Graph, Kind, Schedule, simulate
from lowtide.ir.simulator import resident_bytes
from lowtide.notebook import Shown
from lowtide.place.buffers import Buffers
from lowtide.place.placement import Placement, place
from lowtide.units import format_bytes

CPU_ALIGNMENT = 64
"""Bytes. PyTorch's CPU allocator aligns to that many, and kernels may choose their way by it, so results stay the same."""
ACCELERATOR_ALIGNMENT = 256
"""The same of accelerators: libraries of CUDA's ask for no more, and sizes are multiples of it there anyway."""
Offsets = int | None | list[int]


@dataclass(frozen=True, slots=True)
class Layout(Shown):
    """A schedule with its addresses. ``allocations`` are the simulator's; ``offsets[i]`` is the offset of the i-th, ``None`` if
    it has none. ``reserved_bytes``: ``block_bytes`` plus the most bytes outside the block at one time."""

    schedule: Schedule
    allocations: tuple[Allocation, ...]
    offsets: tuple[int | None, ...]
    reserved_bytes: int
    placement: Placement

    def _heading(self) -> str:
        return "a schedule's addresses"

    def _facts(self) -> dict[str, str]:
        return {
            "allocations": str(len(self.allocations)),
            "block": format_bytes(self.block_bytes),
            "no block below": format_bytes(self.placement.lower_bound_bytes),
            "reserved, with what lies outside": format_bytes(self.reserved_bytes),
        }

    @property
    def block_bytes(self) -> int:
        return self.placement.reserved_bytes

    def of_steps(self) -> list[Offsets]:
        """Return, per compute and fetch of the schedule, the offset of the tensor that it allocates: a list in the order of the
        storages if it allocates several, ``None`` if none."""
        made: dict[int, list[int]] = {}
        by_storage = zip(self.allocations, self.offsets, strict=True)
        for each, offset in sorted(by_storage, key=lambda pair: (pair[0].first, pair[0].storage or 0)):
            if each.storage is not None and offset is not None:
                made.setdefault(each.first, []).append(offset)
        making = (i for i, step in enumerate(self.schedule.steps) if isinstance(step, (Compute, Fetch)))
        there = (made.get(i, []) for i in making)
        return [offsets if len(offsets) > 1 else next(iter(offsets), None) for offsets in there]


def lay_out(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    alignment: int | None = None,
    capacity: int | None = None,
    apart: Collection[int] = (),
    seed: int = 0,
) -> Layout:
    """Lay out a valid schedule in as few bytes as ``place`` finds, or within ``capacity`` bytes, which include those outside
    the block. If no such layout is found, ``placement`` says so and all offsets are ``None``. ``alignment``: by default the
    device's, or 1 if the costs name no device, since sizes may then be in any unit. ``apart``: storages without an offset."""
    if alignment is None:
        alignment = _alignment_of(costs.device)
    allocations = simulate(graph, costs, schedule).allocations
    buffers, members = buffers_of(schedule, allocations, alignment, apart)
    without = (each for each, member in zip(allocations, members, strict=True) if member is None)
    outside = max(resident_bytes(((e.first, e.last, e.bytes) for e in without), len(schedule.steps)))
    found = place(buffers, None if capacity is None else capacity - outside, seed=seed)
    there = found.status.solved
    offsets = tuple(int(found.offsets[member]) if there and member is not None else None for member in members)
    return Layout(schedule, allocations, offsets, found.reserved_bytes + outside, found)


def _alignment_of(device: str) -> int:
    """Return the alignment for the device name of ``Costs``."""
    if not device:
        return 1
    return CPU_ALIGNMENT if "cpu" in device.split() else ACCELERATOR_ALIGNMENT


def buffers_of(
    schedule: Schedule, allocations: tuple[Allocation, ...], alignment: int, apart: Collection[int] = ()
) -> tuple[Buffers, list[int | None]]:
    """Turn the simulator's allocations into buffers. Also returns the buffer of each allocation, ``None`` for ``Kind.FIXED``
    and for tensors of storages ``apart``."""
    rows: list[tuple[int, int, int]] = []
    members: list[int | None] = []
    live: dict[int | None, int | None] = {}  # storage -> the buffer of its latest tensor
    for each in allocations:
        step = schedule.steps[each.first] if schedule.steps else None
        into = step.into if isinstance(step, Compute) and each.kind is Kind.TENSOR else None
        if into in live:  # it takes the place of the overwritten tensor
            member = live.pop(into)
            if member is not None:
                rows[member] = (rows[member][0], each.last + 1, each.bytes)
        elif each.kind is Kind.FIXED or (each.kind is Kind.TENSOR and each.storage in apart):
            member = None
        else:
            member = len(rows)
            rows.append((each.first, each.last + 1, each.bytes))
        members.append(member)
        if each.kind is Kind.TENSOR:
            live[each.storage] = member
    return Buffers.of(rows, alignment), members

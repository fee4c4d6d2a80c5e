"""Tables of addresses for the arena, one row per compute step of a schedule."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowtide.ir import Compute, Kind
from lowtide.memory.arena import AddressTable, Arena, Place
from lowtide.place import Layout
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)
_OUTSIDE = -1  # the offset of allocations outside the arena


class ComputePlaces(NamedTuple):
    """Places of a compute's result tensors, of their second copies, and of its workspace; an offset below 0 is outside the
    arena. ``storages`` are the storages of ``tensors``."""

    tensors: list[Place]
    second_copies: list[Place]
    workspace: Place
    storages: tuple[int, ...]

    @property
    def is_ambiguous(self) -> bool:
        """Whether two result tensors have the same size, so that sizes cannot tell them apart."""
        sizes = [size for _, size in self.tensors]
        return len(set(sizes)) < len(sizes)


@dataclass(slots=True, eq=False)
class Addresses:
    """A table of addresses in an arena; row ``computes[i]`` is for the i-th compute of the schedule. ``block_bytes``: block
    size that the arena needs for it; ``refused``: whether it could not be reserved."""

    table: AddressTable
    computes: tuple[ComputePlaces, ...]
    block_bytes: int
    device: torch.device
    refused: bool = False

    @classmethod
    def of(cls, layout: Layout, arena: Arena, device: torch.device) -> Addresses:
        computes = places_of(layout)
        return cls(AddressTable(arena, [each[:3] for each in computes]), computes, layout.block_bytes, device)

    def reserve(self) -> None:
        """Reserve a large enough block before a pass. If there is no memory for one, logs that once; tensors without a place in
        the arena's block then go where the allocator puts them."""
        if self.refused:
            return
        with (
            contextlib.nullcontext() if self.device.type == "cpu" else torch.accelerator.device_index(self.device.index)
        ):
            self.refused = not self.table.reserve()
        if self.refused:
            _LOG.warning(
                "a block of %d bytes (%s) cannot be reserved: what finds no place in the arena lies outside of it",
                self.block_bytes, format_bytes(self.block_bytes),
            )  # fmt: skip


def places_of(layout: Layout) -> tuple[ComputePlaces, ...]:
    """Return the places of each compute of the schedule. Generator states have none: generators own them."""
    steps = layout.schedule.steps
    computes = {i: step for i, step in enumerate(steps) if isinstance(step, Compute)}
    found = {i: ComputePlaces([], [], (0, 0), ()) for i in computes}
    written = {i for i, step in computes.items() if step.into is not None}  # over another tensor: nothing is allocated
    for each, offset in zip(layout.allocations, layout.offsets, strict=True):
        if not each.bytes or each.first not in found:
            continue
        own, place = found[each.first], (_OUTSIDE if offset is None else offset, each.bytes)
        if each.kind is Kind.WORKSPACE:
            found[each.first] = own._replace(workspace=place)
        elif each.kind is Kind.SECOND_COPY:
            own.second_copies.append(place)
        elif each.kind is Kind.TENSOR and each.storage is not None and each.first not in written:
            own.tensors.append(place)
            found[each.first] = own._replace(storages=(*own.storages, each.storage))
    return tuple(found.values())

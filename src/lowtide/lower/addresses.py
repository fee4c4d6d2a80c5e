"""The addresses of a schedule, compute by compute, as the arena takes them."""

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
_OUTSIDE = -1  # an offset


class ComputePlaces(NamedTuple):
    """Where the tensors that a compute makes go, those that it makes a second time, and what it uses inside; an offset below
    0 is outside of the arena. ``storages`` are those of ``tensors``."""

    tensors: list[Place]
    second_copies: list[Place]
    workspace: Place
    storages: tuple[int, ...]

    @property
    def is_ambiguous(self) -> bool:
        """Whether two tensors cannot be told apart by their sizes."""
        sizes = [size for _, size in self.tensors]
        return len(set(sizes)) < len(sizes)


@dataclass(slots=True, eq=False)
class Addresses:
    """A table in an arena, and what its rows are: ``computes[i]`` is the i-th compute of the schedule. ``block_bytes``: what
    the arena must have for it; ``refused``, whether it could not get that."""

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
        """Before a pass: a block that is large enough. Where there is no memory for one, the log says so, once, and what does
        not lie in the arena's block lies where the allocator puts it."""
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
    """By compute of the schedule. Generator states have no places: they are the generators'."""
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

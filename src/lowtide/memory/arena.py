"""An arena: memory that is held from step to step, in which the tensors of a planned step have their places.

Other allocators find a place for each tensor when they are asked for one: what they cannot use they keep or lose, and large
blocks come from the system anew in every step. A plan knows all lifetimes before, so ``place`` finds the places once, and the
allocator in front of c10's (``memory.cpu_allocator``, ``memory.device_allocator``) gives an allocation its place instead of
asking for memory.

Which allocation is which is told by the operator that runs and by its number in it: when an operator runs first, what it
allocates lies wherever there is room in the block, and it is remembered what that was: its tensors, its second copies of
tensors that are alive still, and what it uses inside. An allocation that is another than expected, or whose place is taken (by
a gradient that somebody keeps, a second forward pass), goes to the ordinary allocator; so does, for now, what an operator uses
inside where it takes more before its results are there than beside them, as convolutions of oneDNN do backward. Nothing
depends on a tensor's leaving in time: the memory goes with the last tensor that lies in it.

On an accelerator libraries allocate workspaces inside an operator that they keep for ever; in the block these would lie in the
way of all that comes later. So an operator that runs first gets only room there for what is as large as something of its own.
"""

from __future__ import annotations

import logging

import torch

from lowtide.device import Accelerator, interface_of
from lowtide.errors import PlanError
from lowtide.memory import cpu_allocator
from lowtide.memory.device_allocator import device_memory
from lowtide.native import core

_LOG = logging.getLogger(__name__)

Arena = core.Arena
AddressTable = core.AddressTable
Place = tuple[int, int]  # offset and bytes


def new_arena(device: torch.device) -> Arena | None:
    """An empty arena on the CPU or an accelerator; ``None`` where this build of PyTorch allows none, which the log says. Raises
    ``PlanError`` for a device without an allocator of its own."""
    if device.type == "cpu":
        if cpu_allocator.install() is not None:
            return Arena()
        _LOG.warning("arena=True has no effect: there is no allocator to be put in front of PyTorch's on this build")
        return None
    accelerator = interface_of(device)
    if not isinstance(accelerator, Accelerator):
        raise PlanError(f"arena=True needs an allocator, and PyTorch has none of {device.type} here; leave it out.")
    memory = device_memory(accelerator)
    return None if memory is None else Arena(memory)


def made(*tensors: torch.Tensor | None) -> None:
    """Tell the arena, while it learns, which tensors the running operator has made, in the order of their places."""
    if AddressTable.is_learning():
        AddressTable.made([0 if one is None else one.untyped_storage().data_ptr() for one in tensors])

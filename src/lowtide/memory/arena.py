"""An arena: a block of memory, kept from step to step, in which the tensors of a planned step have fixed places.

Other allocators search a place for each tensor when asked for one; memory that does not fit again is kept unused or
returned, and large blocks come from the system anew in every step. A plan knows all lifetimes in advance, so ``place``
finds the places once. Then the allocator in front of c10's (``memory.cpu_allocator``, ``memory.device_allocator``)
returns these places.

An allocation is identified by the running operator and by its number in it. When an operator runs for the first time,
its allocations go to any free room in the block, and their kind is recorded: results, second copies of live tensors,
temporary memory. An allocation that differs from the record, or whose place is taken (a gradient that is kept, a second
forward pass), goes to the ordinary allocator. So does, for now, temporary memory that an operator needs before its
results exist and that is larger than beside them (backward convolutions of oneDNN). Correctness does not depend on
tensors being freed in time: an arena's memory lives as long as the last tensor in it.

On an accelerator, libraries allocate workspaces inside an operator and keep them forever; in the block these would
block all later allocations. So there, in an operator's first run, only allocations as large as one of its own tensors
go to the block.
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
    """An empty arena on the CPU or an accelerator; ``None``, with a warning in the log, if this build of PyTorch allows
    none. Raises ``PlanError`` for a device without an allocator of its own."""
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
    """During the first run of an operator, tell the arena which tensors it has made, in the order of their places."""
    if AddressTable.is_learning():
        AddressTable.made([0 if one is None else one.untyped_storage().data_ptr() for one in tensors])

"""An arena: memory that is held from step to step, in which the tensors of a planned step have their places.

Other allocators find a place for each tensor when they are asked for one: what they cannot use they keep or lose, and large
blocks come from the system anew in every step. A plan knows all lifetimes before, so ``place`` finds the places once, and the
allocator in front of c10's (``memory.cpu_allocator``) gives an allocation its place instead of asking for memory.

Which allocation is which is told by the operator that runs and by its number in it: when an operator runs first, what it
allocates lies wherever there is room in the block, and it is remembered what that was: its tensors, its second copies of
tensors that are alive still, and what it uses inside. An allocation that is another than expected, or whose place is taken (by
a gradient that somebody keeps, a second forward pass), goes to the ordinary allocator; so does, for now, what an operator uses
inside where it takes more before its results are there than beside them, as convolutions of oneDNN do backward. Nothing
depends on a tensor's leaving in time: the memory goes with the last tensor that lies in it.

On CUDA there is none yet: an allocator there must know streams, and this one does not.
"""

from __future__ import annotations

import logging

import torch

from lowtide.errors import PlanError
from lowtide.memory import cpu_allocator
from lowtide.native import core

_LOG = logging.getLogger(__name__)

Arena = core.Arena
AddressTable = core.AddressTable
Place = tuple[int, int]  # offset and bytes


def new_arena(device: torch.device) -> Arena | None:
    """An empty arena on ``device``; ``None`` where this build of PyTorch allows none, which is said in the log. Raises
    ``PlanError`` for another device than the CPU."""
    if device.type != "cpu":
        raise PlanError(f"arena=True works on the CPU so far, not on {device.type}; leave it out.")
    counter = cpu_allocator.install()
    if counter is None:
        _LOG.warning("arena=True has no effect: there is no allocator to be put in front of PyTorch's on this build")
        return None
    return Arena(counter)


def made(*tensors: torch.Tensor | None) -> None:
    """Says which tensors the running operator has made, in the order of their places, while that is learned."""
    if AddressTable.is_learning():
        AddressTable.made([0 if one is None else one.untyped_storage().data_ptr() for one in tensors])

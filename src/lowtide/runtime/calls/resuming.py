"""Resuming the generator of a call."""

from __future__ import annotations

import torch

from lowtide.lower import Step
from lowtide.memory.arena import AddressTable


def resumed(generator: Step) -> list[torch.Tensor]:
    """What the step yields next; what is allocated afterwards is not its own.

    Operators run as inside eager's forward pass: nothing is recorded, but kernels that ask find gradients enabled. The engine's
    own thread state is restored afterwards.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        try:
            return next(generator)
        finally:
            AddressTable.end()

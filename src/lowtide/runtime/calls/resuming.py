"""Resume the generator of a call."""

from __future__ import annotations

import torch

from lowtide.lower import Step
from lowtide.memory.arena import AddressTable


def resumed(generator: Step) -> list[torch.Tensor]:
    """Resume the generator and return what it yields; memory allocated afterwards is not the step's.

    Operators run as in eager's forward pass: autograd records nothing, but kernels see that gradients are enabled. The
    thread state of the autograd engine is restored afterwards.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        try:
            return next(generator)
        finally:
            AddressTable.end()

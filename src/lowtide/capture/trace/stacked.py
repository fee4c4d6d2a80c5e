"""``torch.tensor`` of single traced numbers, which reads each of them as Python does: here they are stacked, and traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def stacked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What ``torch.tensor([a, b, c])`` makes of traced tensors without dimensions: without their history, on the CPU unless a
    device is named. ``None`` for any other call."""
    if func is not torch.tensor or not args or not isinstance(args[0], (list, tuple)) or len(args[0]) == 0:
        return None
    single = [isinstance(one, torch.Tensor) and one.dim() == 0 for one in args[0]]
    traced = [isinstance(one, (FakeTensor, FunctionalTensor)) for one in args[0]]
    if not all(single) or not any(traced) or kwargs.get("pin_memory"):
        return None
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    device = torch.get_default_device() if device is None else device
    made = torch.stack([one.detach().to(device) for one in args[0]])
    made = made if dtype is None else made.to(dtype)
    return made.requires_grad_() if kwargs.get("requires_grad") else made

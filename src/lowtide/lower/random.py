"""Random operators replayed exactly.

A generator state is kept as plain bytes, outside torch's allocator, so that it does not count towards the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.program.generators import default_generator


def save(device: torch.device) -> bytearray:
    """The state of the device's default generator."""
    return bytearray(default_generator(device).get_state().numpy().tobytes())


def restore(state: bytearray, device: torch.device) -> None:
    default_generator(device).set_state(torch.frombuffer(state, dtype=torch.uint8))


def replay(state: bytearray, device: torch.device, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``target(*args, **kwargs)`` under ``state``; the generator goes on afterwards as if nothing had been drawn."""
    current = save(device)
    restore(state, device)
    try:
        return target(*args, **kwargs)
    finally:
        restore(current, device)

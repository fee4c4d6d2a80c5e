"""Random operators replayed exactly.

A generator state is kept as plain bytes, outside torch's allocator, so that it does not count towards the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return getattr(torch, device.type).default_generators[device.index or 0]  # type: ignore[no-any-return]


def save(device: torch.device) -> bytearray:
    """The state of the device's default generator."""
    return bytearray(_generator(device).get_state().numpy().tobytes())


def restore(state: bytearray, device: torch.device) -> None:
    _generator(device).set_state(torch.frombuffer(state, dtype=torch.uint8))


def replay(state: bytearray, device: torch.device, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``target(*args, **kwargs)`` under ``state``; the generator goes on afterwards as if nothing had been drawn."""
    current = save(device)
    restore(state, device)
    try:
        return target(*args, **kwargs)
    finally:
        restore(current, device)

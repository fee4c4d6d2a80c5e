"""PyTorch's own random generators, by device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """The one that operators on the device draw from; without an index, on the current one."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index: int = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """The device's generator is afterwards as before. Unlike ``torch.random.fork_rng`` this calls nothing that users call."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)

"""PyTorch's own random generators, by device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SavedState = tuple[torch.Generator, bytes]


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


def saved(generator: torch.Generator) -> SavedState:
    """The generator and its state, outside PyTorch's allocator, so that it does not count towards a budget."""
    return generator, generator.get_state().numpy().tobytes()


@contextlib.contextmanager
def replayed(state: SavedState | None) -> Iterator[None]:
    """The generator draws as it did from the saved state, and goes on afterwards as if nothing had been drawn."""
    if state is None:
        yield
        return
    present = saved(state[0])
    _restore(*state)
    try:
        yield
    finally:
        _restore(*present)


def _restore(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

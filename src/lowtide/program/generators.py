"""PyTorch's own random generators, by device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lowtide.device import accelerator_in_use, accelerators, interface_of

SavedState = tuple[torch.Generator, bytes]


def default_generator(device: torch.device) -> torch.Generator:
    """The one that operators on the device draw from; without an index, on the current one."""
    return interface_of(device).generator()


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """The device's generator is afterwards as before. Unlike ``torch.random.fork_rng`` this calls nothing that users call."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """The same of the CPU's and, once the process uses it, of all devices of its accelerator."""
    used = [] if accelerator_in_use() is None else accelerators()
    with contextlib.ExitStack() as stack:
        for device in (torch.device("cpu"), *(each.device for each in used)):
            stack.enter_context(kept(device))
        yield


def saved(generator: torch.Generator) -> SavedState:
    """The generator and its state, outside PyTorch's allocator, so that it does not count towards a budget."""
    return generator, generator.get_state().numpy().tobytes()


def put_back(state: SavedState | None) -> None:
    """The generator draws as it did from the saved state."""
    if state is not None:
        _restore(*state)


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

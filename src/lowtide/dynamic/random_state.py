"""A random call made again sees the generator as it was, and leaves it as it found it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.program.generators import default_generator

Saved = tuple[torch.Generator, bytes]


def save(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Saved:
    """The generator that a call with these arguments draws from, and its state, held outside PyTorch's allocator."""
    generator = _generator(args, kwargs)
    return generator, generator.get_state().numpy().tobytes()


@contextmanager
def replayed(saved: Saved | None) -> Iterator[None]:
    if saved is None:
        yield
        return
    generator, state = saved
    present = generator.get_state().numpy().tobytes()
    _set(generator, state)
    try:
        yield
    finally:
        _set(generator, present)


def _set(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.from_numpy(np.frombuffer(bytearray(state), np.uint8)))


def _generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device") or next((value.device for value in args if isinstance(value, Tensor)), None)
    device = torch.device(device or "cpu")
    return default_generator(device if device.type == "cuda" else torch.device("cpu"))

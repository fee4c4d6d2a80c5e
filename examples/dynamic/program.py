"""What every program here is: modules, optimizers, and a training step that reads no global but the generator."""

from __future__ import annotations

import contextlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Program:
    """A training run, one step at a time.

    ``step(index)`` trains on the batch of that index and returns its losses (detached scalars). Parameters and data are
    made before; gradients and optimizer state during the steps.
    """

    name: str
    modules: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[int], tuple[torch.Tensor, ...]]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from ``seed``; the caller's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def library_text(*names: str) -> list[str]:
    """The sources of the standard library's modules of these names."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in names]


def library_bytes(*names: str) -> torch.Tensor:
    """The same as one int64 tensor of byte values."""
    text = "".join(library_text(*names)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(data: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    """``count`` pieces of ``data`` from random places, as (count, length)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - length, (count, 1), generator=generator)
    return data[starts + torch.arange(length)]

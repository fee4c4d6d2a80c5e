"""Steps of training, and all that each of them left: beside the model, the generators and what operators keep outside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import lowtide

LeftBehind = tuple[list[torch.Tensor], tuple[Any, ...], int]  # tensors, other state, peak in bytes


def steps(model: nn.Module, shape: tuple[int, ...], count: int, outside: Callable[[], Any]) -> Iterator[LeftBehind]:
    """Of ``count`` steps with SGD on inputs of ``shape``; ``outside`` tells what is kept outside of the model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for number in range(count):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        losses: list[torch.Tensor] = []

        def step(x: torch.Tensor = x, losses: list[torch.Tensor] = losses) -> None:
            losses.append(model(x))
            losses[0].backward()

        peak = lowtide.measure(step).peak_bytes
        tensors = [losses[0], *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
        yield [*tensors, torch.get_rng_state()], (random.getstate(), str(np.random.get_state()), outside()), peak
        optimizer.step()
        optimizer.zero_grad()


def assert_same(expected: list[LeftBehind], found: list[LeftBehind]) -> None:
    """To the bit."""
    for (tensors, state, _), (ours, own_state, _) in zip(expected, found, strict=True):
        assert state == own_state
        assert all(itertools.starmap(torch.equal, zip(tensors, ours, strict=True)))

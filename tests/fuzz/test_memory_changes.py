"""Between two steps tensors come to share memory that the program writes into, or to be views of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.fuzz.changed import rows


class Inner(nn.Module):
    """Adds to its buffer, reads a second one, and writes into its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.kept = [torch.zeros(4)]

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        self.total.add_(1.0)
        y.mul_(2.0)
        seen = x + y + self.other + self.kept[0] + z.real
        return (torch.tanh(self.linear(seen)) + seen).square().sum()


class Outer(nn.Module):
    """Runs in parts where its part is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(*args)
        return loss


Change = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def _buffers(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.other = inner.total[:]
    return x, y, z


def _same_buffer(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.other = inner.total
    return x, y, z


def _data(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.other.data = inner.total.data
    return x, y, z


def _kept(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.kept[0] = inner.total[:]
    return x, y, z


CHANGES: dict[str, Change] = {
    "views of one argument": lambda inner, x, y, z: (x, x[:], z),
    "rows of one argument": lambda inner, x, y, z: (lambda both: (both[:3], both[1:], z))(torch.cat([x, y])[:4]),
    "one argument twice": lambda inner, x, y, z: (x, x, z),
    "a buffer as an argument": lambda inner, x, y, z: (inner.total.expand(3, 4), y, z),
    "a buffer that is a view of another": _buffers,
    "one buffer twice": _same_buffer,
    "one memory of two buffers": _data,
    "a view of a buffer in a list": _kept,
    "a conjugated argument": lambda inner, x, y, z: (x, y, z.conj()),
    "a negated argument": lambda inner, x, y, z: (z.conj().imag, y, z),
}


def _steps(change: Change, planned: bool) -> list[Any]:
    torch.manual_seed(0)
    model = Outer()
    if planned:
        lowtide.rematerialize(model, budget="100%", planner="keep-all")
    found = []
    for step in range(5):
        x = rows() + step
        args: tuple[torch.Tensor, ...] = (x, rows() * 3, torch.complex(x.cos(), x.sin()))
        args = change(model.inner, *args) if step > 1 else args
        model.zero_grad()
        loss = model(*args)
        loss.backward()
        found += [loss.detach(), model.inner.linear.weight.grad, *(one.clone() for one in (*args, *model.buffers()))]
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_memory_between_steps(name: str) -> None:
    expected, found = (_steps(CHANGES[name], planned) for planned in (False, True))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))

"""Memory that tensors and NumPy's arrays share: what is written by the one is found by the other, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide


class _Twice(torch.autograd.Function):
    """Counts in an array when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        ctx.array = array
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.from_numpy(ctx.array).add_(1)
        return gradients[0] * 2, None


def _grown(tensor: torch.Tensor) -> torch.Tensor:
    tensor += 1
    return tensor


def _sum_of(array: np.ndarray) -> float:
    array += 1
    return float(array.sum())


def _local(h: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(np.tril(np.ones((8, 8), dtype=np.float32)))
    mask[mask == 0] = 2
    return h * mask[0]


def _two_over_one(h: torch.Tensor) -> torch.Tensor:
    array = np.ones(16, dtype=np.float32)
    whole, every_second = torch.from_numpy(array), torch.from_numpy(array[::2])
    whole.mul_(3)
    return h * every_second


Use = Callable[["_Model", torch.Tensor, np.ndarray], torch.Tensor]
SEEN: dict[str, Use] = {
    "from_numpy": lambda m, h, given: h * _grown(torch.from_numpy(m.array)),
    "as_tensor": lambda m, h, given: h * _grown(torch.as_tensor(m.array)),
    "asarray": lambda m, h, given: h * _grown(torch.asarray(m.array)),
    "in a dictionary": lambda m, h, given: h * _grown(torch.from_numpy(m.nested["a"][0])),
    "part of it": lambda m, h, given: _grown(torch.from_numpy(m.array[2:4])).sum() + h * torch.from_numpy(m.array),
    "not read": lambda m, h, given: (torch.from_numpy(m.array)[2].copy_(h.detach().sum()), h)[1],
    "an argument": lambda m, h, given: h * _grown(torch.from_numpy(given)),
    "a buffer over it": lambda m, h, given: h * _grown(m.shown) * float(m.array[0]),
    "a buffer of a type that NumPy lacks": lambda m, h, given: h * _grown(m.coarse).float() * (1 + int(m.raw[0])),
    "two over one": lambda m, h, given: _two_over_one(h),
    "of a constant": lambda m, h, given: h * _sum_of(m.constant.numpy()) * m.constant,
    "in the backward pass": lambda m, h, given: _Twice.apply(h, m.array),
}
APART: dict[str, Use] = {
    "of its own": lambda m, h, given: _local(h),
    "a copy": lambda m, h, given: h * _grown(torch.from_numpy(m.array.copy())),
    "a tensor's copy": lambda m, h, given: h * _sum_of(m.constant.numpy().copy()),
    "read alone": lambda m, h, given: h * torch.from_numpy(m.array) * float(m.constant.numpy().sum()),
    "the buffer alone": lambda m, h, given: h * _grown(m.shown),
}


class _Model(nn.Module):
    shown: torch.Tensor
    coarse: torch.Tensor

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
        self.array = np.ones(8, dtype=np.float32)
        self.nested = {"a": [np.ones(8, dtype=np.float32)]}
        self.constant = torch.ones(8)
        self.register_buffer("shown", torch.from_numpy(self.array))
        self.raw = np.zeros(8, dtype=np.uint16)
        self.register_buffer("coarse", torch.frombuffer(self.raw, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, given: np.ndarray) -> torch.Tensor:
        return self.use(self, self.layers(x).tanh(), given).square().sum()

    @property
    def held(self) -> list[np.ndarray]:
        return [self.array, *self.nested["a"], self.constant.numpy(), self.raw]


def _copied(model: _Model) -> _Model:
    other = copy.deepcopy(model)
    other.shown = torch.from_numpy(other.array)
    other.coarse = torch.frombuffer(other.raw, dtype=torch.bfloat16)
    return other


@pytest.mark.parametrize("use", [*SEEN, *APART])
def test_what_is_written_through_shared_memory_is_found_there(use: str) -> None:
    torch.manual_seed(0)
    model = _Model((SEEN | APART)[use])
    eager, arrays = _copied(model), [np.ones(8, dtype=np.float32) for _ in range(2)]
    x = torch.randn(64, 8)
    lowtide.rematerialize(model, (x, arrays[0]), budget="90%", planning="wait")
    for _ in range(3):
        losses = []
        for one, array in zip((model, eager), arrays, strict=True):
            losses.append(one(x, array))
            losses[-1].backward()
        assert torch.equal(*losses)
        for mine, other in zip((*model.held, arrays[0]), (*eager.held, arrays[1]), strict=True):
            np.testing.assert_array_equal(mine, other)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("use", SEEN)
def test_such_a_program_is_refused_with_what_to_do(use: str) -> None:
    model = _Model(SEEN[use])
    with pytest.raises(lowtide.CaptureError, match=r"share .*register_buffer"):
        lowtide.rematerialize(
            model, (torch.randn(64, 8), np.ones(8, dtype=np.float32)), budget="90%", on_capture_error="error"
        )


@pytest.mark.parametrize("use", APART)
def test_memory_that_nobody_else_has_stays_in_the_program(use: str) -> None:
    model = _Model(APART[use])
    given = torch.randn(64, 8), np.ones(8, dtype=np.float32)
    lowtide.rematerialize(model, given, budget="90%", planning="wait", on_capture_error="error")

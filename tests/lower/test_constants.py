"""Numbers among the arguments of operators are in generated code what they were."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import lowtide


class _Zeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.threshold(self.linear(x), 0.1, 0.0).tanh() + 1
        return torch.stack([y.sum() * -0.0, y.sum() * 0.0, (y * True).sum() * 1.0, (y * 1).sum()])


def test_equal_numbers_that_are_not_the_same() -> None:
    """Zeros of both signs, and ones of three types."""
    torch.manual_seed(0)
    plain, x = _Zeros(), torch.randn(3, 4)
    planned = copy.deepcopy(plain)
    lowtide.rematerialize(planned, (x,), budget="100%", planner="keep-all")
    found = []
    for model in (plain, planned):
        y = model(x)
        (1 / y).sum().backward()
        found.append((y.signbit().tolist(), y.tolist(), model.linear.weight.grad.isnan().tolist()))  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert found[0][0] == [True, False, False, False]

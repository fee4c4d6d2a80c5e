"""A result and the same result detached: gradients reach the one and not the other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Results:
        h = self.linear(x)
        return h.square().mean(), h, h.detach()


@pytest.mark.parametrize(
    "loss",
    [
        lambda results: results[0] + results[1].sum(),
        lambda results: results[1].sum(),
        lambda results: (results[1] * results[2]).sum(),
        lambda results: results[0] * results[2].sum(),
    ],
)
def test_a_result_beside_itself_detached(loss: Callable[[Results], torch.Tensor]) -> None:
    torch.manual_seed(0)
    plain = _Both()
    model, x = copy.deepcopy(plain), torch.randn(8, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for _ in range(2):
        for one in (plain, model):
            results = one(x)
            assert [tensor.requires_grad for tensor in results] == [True, True, False]
            loss(results).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]

"""``torch.cond``: a model that calls it runs in parts, and everybody else's calls go on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowtide
from tests.support.versions import needs_2_13


class _Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return torch.cond(y.sum() > 0, lambda one: one.sin(), lambda one: one.cos(), (y,)).square().mean()  # type: ignore[no-any-return]


@needs_2_13
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_a_model_that_calls_it_runs_in_parts() -> None:
    torch.manual_seed(0)
    model, x = _Deciding(), torch.randn(32, 8)
    eager = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="90%")
    for _ in range(3):
        for one in (model, eager):
            one.zero_grad()
        loss, expected = model(x), eager(x)  # which compiles its branches
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for own, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)  # type: ignore[arg-type]

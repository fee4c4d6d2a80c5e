"""Modules that are no programs, run again in the backward pass: ``runtime.recomputed``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowtide.runtime.recomputed import recomputed


class _Ragged(nn.Module):
    """Attention within rows of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in self.projections]
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors() -> None:
    torch.manual_seed(0)
    model = _Ragged()
    plain = copy.deepcopy(model)
    rows = torch.nested.nested_tensor([torch.randn(length, 16) for length in (3, 5, 2)], layout=torch.jagged)
    ran: list[bool] = []
    found = recomputed(model, model.forward, (rows,), {}, lambda: ran.append(True))
    expected = plain(rows)
    assert torch.equal(found.values(), expected.values())
    for result in (found, expected):
        torch.nested.to_padded_tensor(result, 0.0).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert ran and all(torch.equal(own.grad, other.grad) for own, other in pairs)

"""A model that runs online by itself, with passes inside of its own. By itself: code beside names ``create_graph``."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.dynamic.context import is_inside


class _Penalty(nn.Module):
    """How many layers run depends on the activations. Passes inside of its own, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def energy(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
            if inputs.mean() > 2.0:
                break
        return inputs.sum()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(inputs), inputs, create_graph=True)
        again: torch.Tensor = checkpoint(self.energy, inputs, use_reentrant=True)
        return slope.square().sum() + again


def test_passes_inside_of_a_pass() -> None:
    torch.manual_seed(0)
    plain, inputs = _Penalty(), torch.randn(256, 64)
    model = copy.deepcopy(plain)
    peak = lowtide.measure(lambda: plain(inputs).backward()).peak_bytes
    lowtide.rematerialize(model, budget=7 * peak // 10)
    for step in range(3):
        model.zero_grad()
        found = lowtide.measure(lambda: model(inputs).backward()).peak_bytes
        assert step == 0 or found <= 7 * peak // 10
        assert not is_inside()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs if theirs.grad is not None)
    assert any(one.grad is not None for one in plain.parameters())
    lowtide.restore(model)

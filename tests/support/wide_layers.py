"""Layers whose parameters, and so gradients and an optimizer's states, take far more than what is computed from them."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, LAYERS, ROWS = 64, 8, 16
WEIGHT_BYTES = 4 * WIDTH * WIDTH


class WideLayers(nn.Module):
    """With a residual sum over each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def batch(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))

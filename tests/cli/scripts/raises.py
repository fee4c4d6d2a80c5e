"""Trains one step, and fails."""

import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
model(torch.randn(8, 16)).sum().backward()


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the script's own")


Broken().train()(torch.randn(8, 16))

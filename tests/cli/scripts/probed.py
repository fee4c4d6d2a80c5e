"""Models that are called before they train: for the shape of what a part returns, to make lazy parameters, and with one row.
A parametrized layer is called for its weight while the model is made."""

import sys

import torch
from torch import nn
from torch.nn.utils import parametrizations


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = parametrizations.spectral_norm(nn.Linear(32, 32))
        more = (layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh()))
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), hidden, nn.Tanh(), *more)
        self.head = nn.Linear(self.body(torch.zeros(256, 16)).shape[1], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Lazy(nn.Sequential):
    pass


torch.manual_seed(0)
lazy = Lazy(*(layer for _ in range(6) for layer in (nn.LazyLinear(32), nn.Tanh())), nn.Linear(32, 1))
lazy(torch.zeros(1, 16))
for model in (lazy, Probed()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(model(torch.zeros(1, 16)).shape)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(int(sys.argv[1]), 16)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())

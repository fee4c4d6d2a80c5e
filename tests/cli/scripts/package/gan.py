"""A generator and a discriminator that train by turns, a teacher that does not, and a loss with a parameter of its own."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
options = parser.parse_args()


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


class Scale(nn.Module):
    """Cannot be captured: its program depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale if x.mean() > 0 else x * self.scale * 0.5


def layers(kind: type, last: int) -> nn.Sequential:
    made = kind(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, last))
    assert isinstance(made, nn.Sequential)
    return made


torch.manual_seed(0)
generator, discriminator, scale = layers(Generator, 32), layers(Discriminator, 1), Scale()
teacher = layers(nn.Sequential, 32).requires_grad_(False)
ends = nn.BCEWithLogitsLoss()
optimizers = [torch.optim.SGD([*m.parameters(), *scale.parameters()], lr=0.1) for m in (discriminator, generator)]
for step in range(options.steps):
    real, noise = torch.randn(256, 32), torch.randn(256, 32)
    fake = generator(noise)
    loss = ends(discriminator(real), torch.ones(256, 1)) + ends(discriminator(fake.detach()), torch.zeros(256, 1))
    optimizers[0].zero_grad()
    loss.backward()
    optimizers[0].step()
    distance = (teacher(fake) - teacher(real)).square().mean()
    other = scale(ends(discriminator(fake), torch.ones(256, 1)) + distance)
    optimizers[1].zero_grad()
    other.backward()
    optimizers[1].step()
    print(step, loss.item().hex(), other.item().hex())

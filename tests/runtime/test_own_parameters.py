"""Models that say themselves which parameters are trained."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

import lowtide


class Chosen(nn.Module):
    """Its ``parameters`` takes no arguments and leaves some out, as those of tokenizers with a discriminator do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.judge = nn.Linear(32, 1)

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        yield from self.net.parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.judge(self.net(x)).square().mean()


def test_a_model_whose_parameters_takes_no_arguments_is_planned() -> None:
    torch.manual_seed(0)
    plain = Chosen()
    own, x = copy.deepcopy(plain), torch.randn(64, 8)
    lowtide.rematerialize(own, (x,), budget="80%")
    for model in (plain, own):
        model(x).backward()
    for (name, one), (_, two) in zip(plain.named_parameters(), own.named_parameters(), strict=True):
        assert one.grad is not None and two.grad is not None, name
        assert torch.equal(one.grad, two.grad), name

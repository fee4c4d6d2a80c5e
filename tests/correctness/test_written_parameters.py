"""Row: parameters that the forward pass writes into where autograd does not look: clipped, normalized, ``max_norm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import BATCH, WIDTH, WithLoss, perceptron, rows
from tests.support.training import MINIMUM, compare_training

Write = Callable[[nn.Parameter], Any]


def _clipped(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def _normalized(weight: nn.Parameter) -> None:
    weight.copy_(nn.functional.normalize(weight, dim=1))


def _twice(weight: nn.Parameter) -> None:
    weight.data.mul_(0.99)
    weight.add_(0.001)


def _replaced(weight: nn.Parameter) -> None:
    weight.data.copy_(weight.data.roll(1, 0))


def _assigned(weight: nn.Parameter) -> None:
    weight.data = weight.data.roll(1, 0) * 0.9


def _in_a_row(weight: nn.Parameter) -> None:
    weight[0].zero_()


class _Writing(nn.Module):
    """Writes into a weight, and computes with it in two places."""

    def __init__(self, write: Write, late: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), perceptron(3, WIDTH)
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), perceptron(2, WIDTH)
        self.write, self.late = write, late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.late:
                self.write(self.middle.weight)
        x = self.layers(torch.tanh(self.first(x)))
        x = self.middle(torch.tanh(self.middle(x)))
        with torch.no_grad():
            if self.late:
                self.write(self.middle.weight)
        return self.last(torch.tanh(x))


@pytest.mark.parametrize("write", [_clipped, _normalized, _twice, _replaced, _assigned, _in_a_row])
def test_weights_are_written_first(write: Write) -> None:
    compare_training(lambda: WithLoss(_Writing(write)), rows(), budgets=("70%", MINIMUM), quick=0)


def test_a_write_after_the_weight_was_used() -> None:
    """Eager's backward pass reads what was written then."""
    compare_training(lambda: WithLoss(_Writing(_clipped, late=True)), rows(), budgets=("70%", MINIMUM))


class _Clipping(nn.Module):
    """As critics of Wasserstein's GAN are held: all parameters, in each call, those of norms included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(perceptron(3, WIDTH), nn.LayerNorm(WIDTH), perceptron(2, WIDTH))
        self.scale = nn.Parameter(torch.ones(()))
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        return self.layers(x) * self.scale


def test_all_parameters_are_clipped() -> None:
    compare_training(lambda: WithLoss(_Clipping()), rows(), budgets=("70%", MINIMUM), quick=0)


class _Averaging(nn.Module):
    """As MoCo's second encoder is averaged in its official code."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.average = perceptron(4, WIDTH), perceptron(4, WIDTH)
        self.average.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.online.parameters(), strict=True):
                mean.data = mean.data * 0.9 + now.data * 0.1
            target = self.average(x)
        return self.online(x) - target


def test_an_average_of_parameters_is_assigned() -> None:
    compare_training(lambda: WithLoss(_Averaging()), rows(), budgets=("70%", MINIMUM), quick=0)


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, max_norm=1.0)
        self.layers = perceptron(3, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.tanh(self.table(tokens)))


def test_embeddings_with_a_largest_norm() -> None:
    def tokens(seed: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        return (torch.randint(0, 20, (BATCH, 5), generator=torch.Generator().manual_seed(seed)),), {}

    compare_training(lambda: WithLoss(_Embedding()), tokens, budgets=("70%", MINIMUM), quick=0)


def test_an_argument_is_written_into() -> None:
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron(4, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.data.clamp_(-1, 1)
            return self.layers(x)

    compare_training(lambda: WithLoss(Clamping()), rows(requires_grad=True), budgets=("70%", MINIMUM), quick=0)


def test_another_call_that_waits_for_its_backward_pass() -> None:
    """Of a critic that is called twice for each step: the second call writes without a new version."""
    torch.manual_seed(0)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    plain = WithLoss(_Clipping())
    model = WithLoss(_Clipping())
    model.load_state_dict(plain.state_dict())
    lowtide.rematerialize(model, (x,), budget="100%")
    for each in (plain, model):
        first = each(x)
        (first - each(y)).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
        assert (own.grad is None) == (other.grad is None)
        assert own.grad is None or torch.equal(own.grad, other.grad)  # type: ignore[arg-type]

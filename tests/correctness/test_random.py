"""Row: dropout > 0, several iterations: eager's masks, a fresh mask each time, eager's generator state afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.networks import Residual, WithLoss, perceptron, residual_blocks, rows
from tests.support.training import compare_training, prepared


def _dropout_network() -> nn.Module:
    body = residual_blocks(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)))
    return WithLoss(nn.Sequential(body, nn.Dropout(0.1), nn.Linear(32, 8)))


def test_dropout() -> None:
    compare_training(_dropout_network, rows(), budgets=("100%", "70%", "45%"))


def test_masks_are_fresh() -> None:
    """The same input gives another loss at every iteration, as in eager."""

    def same_input(iteration: int) -> Any:
        return rows()(0)

    model = prepared(_dropout_network, same_input, "45%")
    losses = {model(*same_input(0)[0]).item() for _ in range(4)}
    assert len(losses) == 4


class _OtherNoise(nn.Module):
    """Random operators beside dropout, one of whose results nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        noise = torch.randn_like(x)
        x = self.body(x + 0.1 * noise)
        keep = torch.bernoulli(torch.full_like(x, 0.8))
        x = self.body(x * keep) * torch.rand(x.shape[0], 1)
        order = torch.randperm(x.shape[0])
        return x[order] + torch.empty_like(x).uniform_(-0.1, 0.1)


def test_other_random_operators() -> None:
    compare_training(lambda: WithLoss(_OtherNoise()), rows(), budgets=("70%", "50%", "45%"))


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3), nn.RReLU()],
    ids=lambda layer: type(layer).__name__,
)
def test_other_dropouts(layer: nn.Module) -> None:
    def network() -> nn.Module:
        return WithLoss(nn.Sequential(perceptron(2), layer, Residual(perceptron(2)), layer, nn.Linear(32, 4)))

    compare_training(network, rows(), budgets=("60%",))


def test_attention_dropout() -> None:
    def network() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        return WithLoss(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    def inputs(iteration: int) -> Any:
        return (torch.randn(16, 16, 32, generator=torch.Generator().manual_seed(iteration)),), {}

    compare_training(network, inputs)

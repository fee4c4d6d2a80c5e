"""Row: BatchNorm and other mutated buffers: updated once per forward, untouched by capture and profiling."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.networks import WithLoss, generator, residual_blocks, rows
from tests.support.training import compare_training, prepared


def _images(iteration: int) -> Any:
    return (torch.randn(4, 3, 16, 16, generator=generator(iteration)),), {}


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))


def _convolutional(**options: Any) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, **options), nn.ReLU(inplace=True))
    return WithLoss(nn.Sequential(stem, residual_blocks(_convolution, 3), nn.Flatten(), nn.Linear(8 * 256, 5)))


def test_batch_norm() -> None:
    compare_training(_convolutional, _images, budgets=("100%", "70%", "45%"))


def test_batch_norm_cumulative_average() -> None:
    """``momentum=None`` divides by ``num_batches_tracked``, which eager reads as a number."""
    compare_training(lambda: _convolutional(momentum=None), _images, budgets=("60%",))


def test_batch_norm_without_statistics() -> None:
    compare_training(lambda: _convolutional(track_running_stats=False, affine=False), _images, budgets=("60%",))


def test_statistics_are_updated_once_per_forward() -> None:
    model = prepared(_convolutional, _images, "45%")
    norm = model.body[0][1]
    assert norm.num_batches_tracked.item() == 0
    model(*_images(0)[0]).backward()
    model(*_images(1)[0])
    assert norm.num_batches_tracked.item() == 2


class _Counters(nn.Module):
    """Buffers written in every way: in place, by assignment, by an exponential average read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(32))
        self.register_buffer("last", torch.zeros(32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.body(x * (1 + self.average))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.last = x.detach()[0].clone()
        return x * self.average


def test_mutated_and_reassigned_buffers() -> None:
    compare_training(lambda: WithLoss(_Counters()), rows())


def test_spectral_norm() -> None:
    """Power iteration writes its vectors in place at every forward."""

    def network() -> nn.Module:
        layers = (nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)) for _ in range(3))
        return WithLoss(nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers)))

    compare_training(network, rows(), budgets=("60%",))

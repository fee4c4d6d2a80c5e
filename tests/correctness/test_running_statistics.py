"""Kernels of accelerators update running statistics that, by their schemas, they only read. Here they run on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

_ATEN = torch.ops.aten


def _cudnn(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    reserve = torch.zeros(64, dtype=torch.uint8)
    return *torch.native_batch_norm(x, w, b, mean, var, training, momentum, eps), reserve


def _cudnn_backward(x: Any, g: Any, w: Any, mean: Any, var: Any, saved: Any, inverse: Any, eps: float, _: Any) -> Any:
    return _ATEN.native_batch_norm_backward(g, x, w, mean, var, saved, inverse, True, eps, [True, True, True])


def _gathered(x: Any, mean: Any, invstd: Any, running: Any, var: Any, momentum: float, eps: float, counts: Any) -> Any:
    """Of one rank."""
    if running is not None:
        running.mul_(1 - momentum).add_(mean[0], alpha=momentum)
        var.mul_(1 - momentum).add_(invstd[0].pow(-2) - eps, alpha=momentum)
    return mean[0].clone(), invstd[0].clone()


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_batch_norm", _cudnn, "CPU")
        library.impl("cudnn_batch_norm_backward", _cudnn_backward, "CPU")
        library.impl("batch_norm_gather_stats_with_counts", _gathered, "CPU")
        yield


class _Norm(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arguments = self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, self.eps
        normed: torch.Tensor = _ATEN.cudnn_batch_norm(x, *arguments)[0]
        return normed


class _Gathering(nn.BatchNorm2d):
    """As ``nn.SyncBatchNorm`` does it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            gathered = mean[None], (var + self.eps).rsqrt()[None]
            counts = torch.tensor([x.numel() / 8])
            statistics = self.running_mean, self.running_var, 0.1, self.eps, counts
            mean, inverse = _ATEN.batch_norm_gather_stats_with_counts(x, *gathered, *statistics)
        return (x - mean[:, None, None]) * inverse[:, None, None]


def _model(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.GELU()))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


def _trained(model: nn.Module, passes: int = 1) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(3):
        loss = model(torch.randn(4, 8, 16, 16)).square().mean()
        for number in range(passes):
            loss.backward(retain_graph=number + 1 < passes)
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values()]


@pytest.mark.parametrize("norm", [_Norm, _Gathering])
@pytest.mark.parametrize(("budget", "passes"), [("70%", 1), ("100%", 2), ("online", 1)])
def test_statistics_are_updated_once_a_step(norm: type[nn.Module], budget: str, passes: int) -> None:
    model = _model(norm)
    model(torch.randn(4, 8, 16, 16))
    eager = copy.deepcopy(model)
    if budget == "online":
        peak = lowtide.measure(_trained, copy.deepcopy(model)).peak_bytes
        with lowtide.online(f"{int(peak * 0.8)}B"):
            found = _trained(model)
    else:
        x = torch.randn(4, 8, 16, 16)
        lowtide.rematerialize(model, (x,), budget=budget, on_capture_error="error", planning="wait")
        found = _trained(model, passes)
    for mine, other in zip(found, _trained(eager, passes), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)

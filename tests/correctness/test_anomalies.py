"""Training under ``torch.autograd.detect_anomaly()``, where PyTorch's engine looks at every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import perceptron
from tests.support.training import make

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")


class _Energy(nn.Module):
    """Whose forward pass differentiates, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (force,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
        return (force - x).square().mean()


class _Root(nn.Module):
    """With a gradient that is no number where its argument is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = perceptron(2), perceptron(2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x).square() * scale).sqrt()).square().mean()


@pytest.mark.parametrize("kind", [lambda: nn.Sequential(perceptron(3), nn.Dropout(0.1), perceptron(3)), _Energy])
@pytest.mark.parametrize("checks", [True, False])
def test_it_is_one_program_still(kind: Any, checks: bool) -> None:
    plain, planned = make(kind), make(kind)
    x = torch.randn(64, 32)
    lowtide.rematerialize(planned, (x.clone(),), budget="90%", on_capture_error="error")
    for model in (plain, planned):
        with torch.autograd.set_detect_anomaly(True, check_nan=checks):
            for step in range(3):
                torch.manual_seed(step)
                model(x.clone()).square().mean().backward()
                assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() == checks
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), planned.parameters(), strict=True))


def test_a_gradient_that_is_no_number_is_found() -> None:
    model, x = make(_Root), torch.randn(64, 32)
    lowtide.rematerialize(model, (x, torch.ones(())), budget="90%", on_capture_error="error")
    with torch.autograd.set_detect_anomaly(True):
        model(x, torch.ones(())).backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            model(x, torch.zeros(())).backward()
        model(x, torch.ones(())).backward()

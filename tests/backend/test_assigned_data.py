"""``parameter.data = value`` in graphs of ``torch.compile(backend="lowtide")``."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.support.networks import WIDTH, perceptron


class Assigning(nn.Module):
    def __init__(self, shares: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(), perceptron()
        self.teacher.requires_grad_(False)
        self.shares = shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                old.data = new.data if self.shares else old.data * 0.9 + new.data * 0.1
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target + 1)


def test_values_are_written() -> None:
    torch.manual_seed(0)
    model = Assigning()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="lowtide", options={"budget": "100%", "compiler": "eager"})
    for _ in range(3):
        x = torch.randn(64, WIDTH)
        losses = [compiled(x), plain(x)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, other)
            assert own.grad is other.grad is None or torch.equal(own.grad, other.grad)


def test_memory_of_another_parameter_is_not() -> None:
    """The two would be one from then on."""
    compiled = torch.compile(Assigning(True), backend="lowtide", options={"budget": "100%", "compiler": "eager"})
    with pytest.raises(lowtide.CaptureError, match="other memory in place"):
        compiled(torch.randn(64, WIDTH))


class Former(Assigning):
    """What the parameter was is read after the assignment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.teacher[0].weight
        with torch.no_grad():
            former = weight.data
            weight.data = former * 0.5
            target = x @ former
        return F.mse_loss(self.student(x), target)


def test_the_former_memory_is_not_overwritten() -> None:
    compiled = torch.compile(Former(), backend="lowtide", options={"budget": "100%", "compiler": "eager"})
    with pytest.raises(lowtide.CaptureError, match="other memory in place"):
        compiled(torch.randn(64, WIDTH))

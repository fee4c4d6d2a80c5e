"""Elements that a mask of computed values selects: one program where they only go back to where it selects them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import runtime_of
from tests.support.beside import assert_same_steps, plain_and_planned

STEPS = 4
Compute = Callable[[torch.Tensor], torch.Tensor]


class _Selecting(nn.Module):
    """Makes something of hidden rows between two layers."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.compute, self.calls, self.last = compute, 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.compute(torch.tanh(self.first(x)))
        self.calls += 1
        self.last = hidden.detach().mean()
        return torch.tanh(self.second(hidden)).square().sum()


def _least(h: torch.Tensor) -> torch.Tensor:
    """As MuZero's states are scaled."""
    most = h.abs().amax(1, keepdim=True) * 1
    most[most < 0.3] += 1e-1
    return h / most


def _nearest(h: torch.Tensor) -> torch.Tensor:
    """As the furthest points of PointNet++ are found."""
    distance, found = torch.full((len(h),), 1e10), []
    for number in range(3):
        other = (h - h[number]).square().sum(1)
        mask = other < distance
        distance[mask] = other[mask]
        found.append(distance.max(-1)[1])
    return h[torch.stack(found)] + distance.mean()


def _indices(h: torch.Tensor) -> torch.Tensor:
    """Other indices in the place of some, as where points have few neighbours."""
    index, first = h.argsort(1), h.argmax(1, keepdim=True).expand(-1, 8).clone()
    mask = index == 3
    index[mask] = first[mask]
    return h.gather(1, index)


def _turned(h: torch.Tensor) -> torch.Tensor:
    h = h * 1
    mask = h < 0
    h[mask] = -h[mask] * 2 - 1
    return h


def _rows(h: torch.Tensor) -> torch.Tensor:
    """By a mask of rows, and by what it does not select, which is asked for twice."""
    h = h.clone()
    mask = h.mean(1) > 0
    h[mask] *= 0.5
    h[~mask] = h.detach()[~mask] + 1
    return h


def _difference(h: torch.Tensor) -> torch.Tensor:
    made, mask = torch.zeros_like(h), h > 0
    made[mask] = h[mask] - h.flip(0)[mask]
    return made


def _overwritten(h: torch.Tensor) -> torch.Tensor:
    """What was selected is not what the tensor holds when it is put back."""
    h = h * 1
    mask = h > 0
    selected = h[mask]
    h.mul_(2)
    h[mask] = selected
    return h


def _mask_overwritten(h: torch.Tensor) -> torch.Tensor:
    h = h * 1
    mask = h > 0
    selected = h.detach()[mask]
    mask.logical_and_(h < 0.1).logical_or_(h > 0)
    h[mask] = selected
    return h


def _shared(h: torch.Tensor) -> torch.Tensor:
    made, mask = h * 1, h > 0
    selected = h.detach()[mask]
    same = selected.detach()
    selected.add_(1)
    made[mask] = same
    return made


def _mean(h: torch.Tensor) -> torch.Tensor:
    return h * h[h > 0].mean()


def _step(model: _Selecting, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(16, 8))
    model.zero_grad()
    loss.backward()
    return torch.stack((loss.detach(), model.last))


@pytest.mark.parametrize("compute", [_least, _nearest, _indices, _turned, _rows, _difference])
def test_what_goes_back_is_one_program(compute: Compute) -> None:
    plain, planned = plain_and_planned(lambda: _Selecting(compute))
    assert_same_steps(plain, planned, _step, STEPS)
    runtime = runtime_of(planned)
    assert runtime is not None and sum(map(len, runtime.entries.values())) == 1


@pytest.mark.parametrize("compute", [_overwritten, _mask_overwritten, _shared, _mean])
def test_what_is_computed_with_otherwise_is_none(compute: Compute) -> None:
    plain, planned = plain_and_planned(lambda: _Selecting(compute))
    assert_same_steps(plain, planned, _step, STEPS)
    with pytest.raises(lowtide.CaptureError, match=r"values of floating-point or random tensors .*test_selected.py"):
        lowtide.plan(_Selecting(compute), (torch.randn(16, 8),), budget="100%")


class _Returning(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        return hidden[hidden > 0]


def test_what_is_returned_is_none() -> None:
    with pytest.raises(lowtide.CaptureError, match=r"values of floating-point or random tensors"):
        lowtide.plan(_Returning(8, 8), (torch.randn(16, 8),), budget="100%")

"""On a CUDA device: the same bits, within the budget. Skipped where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.meter import measure

pytestmark = pytest.mark.gpu

_ROWS, _WIDTH, _DEPTH = 4096, 256, 12


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return result


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(_DEPTH)), nn.Linear(_WIDTH, 8)).cuda()


def _data() -> torch.Tensor:
    return torch.randn(_ROWS, _WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def _trained(model: nn.Module, data: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Losses, then parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.cuda.manual_seed(2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def _peak(run: Callable[[], Any]) -> int:
    measurement = measure(run)
    assert measurement.device.startswith("cuda")
    return measurement.peak_bytes


def _step_peak(model: nn.Module, data: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)
    return _peak(lambda: model(data).square().mean().backward())


@pytest.mark.parametrize("share", [70, 40])
def test_planned(share: int) -> None:
    """``rematerialize``: losses and parameters equal to the bit, dropout included; the measured peak within the budget."""
    data = _data()
    plain = _model()
    budgeted = copy.deepcopy(plain)
    plain_peak = _step_peak(plain, data)
    budget = plain_peak * share // 100
    lowtide.rematerialize(budgeted, (data,), budget=budget)
    expected = _trained(_model(), data)
    actual = _trained(budgeted, data)
    assert all(map(torch.equal, actual, expected))
    assert _step_peak(budgeted, data) <= budget


def test_predicted_peak_is_the_allocators() -> None:
    """Within the allocator's rounding to 512 bytes of every block."""
    data = _data()
    model = _model()
    lowtide.rematerialize(model, (data,), budget="60%")
    (plan,) = lowtide.plans(model)
    measured = _step_peak(model, data)
    assert measured <= plan.budget_bytes
    assert measured >= 0.97 * plan.peak_bytes


@pytest.mark.parametrize("share", [70, 40])
def test_online(share: int) -> None:
    """``online``: equal to the bit; once every signature was seen, within the budget."""
    data = _data()
    expected = _trained(_model(), data)
    plain_peak = _peak(lambda: _trained(_model(), data))
    budget = plain_peak * share // 100
    model = _model()
    session = lowtide.online(budget)
    with session:
        actual = _trained(model, data)
        assert session.statistics.evictions > 0
        again = lowtide.online(budget)  # its peak counts from here
        with again:
            _trained(model, data)
        assert again.statistics.peak_bytes <= budget
    assert all(map(torch.equal, actual[:3], expected[:3]))


def test_online_leaves_cpu_tensors_alone() -> None:
    torch.cuda.init()
    with lowtide.online("64MiB") as session:
        tensors = [torch.full((1 << 20,), float(index)) for index in range(64)]
        there = [torch.full((1 << 20,), float(index), device="cuda") * 2 for index in range(32)]
        assert session.statistics.evictions > 0
        assert [tensor[-1].item() for tensor in there] == [2.0 * index for index in range(32)]
    assert [tensor[0].item() for tensor in tensors] == list(range(64))

"""The benchmark over models of other packages makes a row of a model that is planned as a whole, or in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.outside_models import OUTSIDE
from benchmarks.outside_models.register import Outside
from benchmarks.outside_run import row_of
from benchmarks.zoo import Sample, seeded

WIDTH, EXPERTS = 64, 4


class _Routed(nn.Module):
    """Sends rows where their values say: no part."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 8 for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number)[:, 0]
            if rows.numel():
                result = result.index_add(0, rows, torch.tanh(torch.tanh(torch.tanh(x[rows] @ expert))))
        return result


def _blocks(routed: bool) -> nn.Module:
    def block() -> list[nn.Module]:
        wide = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)]
        return [nn.Sequential(*wide), *([_Routed()] if routed else [])]

    return nn.Sequential(*(each for _ in range(3) for each in block()))


@pytest.mark.parametrize("routed", [False, True])
def test_a_row(routed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Sample:
        return _blocks(routed), (torch.randn(2048, WIDTH),), {}

    monkeypatch.setitem(OUTSIDE, "blocks", Outside("torch", seeded(make)))
    row = row_of("blocks", "60%", 5)
    assert row.outcome == "good", row
    assert (row.parts > 0) == routed
    assert row.budget == "60%"
    assert 0.3 < row.peak <= 0.6 * 1.03
    assert row.predicted > 1

"""What code reads, on every version of Python: each spells it in other instructions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture.python_state.code.code_names import is_read, names_in
from tests.support.beside import assert_as_eager


class _Scaled(nn.Module):
    scale = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _Scaling(_Scaled):
    scale = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        self.count = self.total = 0

    def forward(self, x: torch.Tensor, n: int = 1) -> torch.Tensor:
        self.count += 1
        self.total += n
        return (super().scaled(self.body(x)) * super().scale).square().mean()


def test_what_a_class_above_has_is_read() -> None:
    names = names_in(_Scaling.forward.__code__)
    assert {"scaled", "scale", "body", "square"} <= names.attributes
    assert "super" in names.variables


@pytest.mark.parametrize("name", ["count", "total"])
def test_counting_is_no_reading(name: str) -> None:
    assert not is_read(name, [_Scaling.forward], by_string=False)


def test_what_a_class_above_has_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 8)

    def step(model: _Scaling, number: int) -> torch.Tensor:
        monkeypatch.setattr(_Scaled, "scale", (2.0, 5.0, 5.0)[number])
        model.zero_grad()
        loss: torch.Tensor = model(x)
        loss.backward()
        return loss

    planned: Any = assert_as_eager(_Scaling, step, 3)
    assert planned.count == planned.total == 3

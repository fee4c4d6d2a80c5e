"""What ``forward`` reaches both through the model and by a variable or an argument, and writes: no copy shows both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.fuzz.changed import Computes, Thing, rows

_THING = Thing(step=0, scale=1.0, inner=Thing(scale=1.0))
_TABLE: dict[str, Any] = {"step": 0, "scale": 1.0}
_MODEL: list[Any] = []


class _Model(Computes):
    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__(compute)
        self.thing, self.table, self.scale = _THING, _TABLE, 1.0
        self.register_buffer("total", torch.zeros(4))


def _counts(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.thing.step += 1
    return y * 2 if _THING.step > 3 else y


def _counts_outside(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _THING.step += 1
    return y * 2 if self.thing.step > 3 else y


def _sets(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.thing.inner.scale = 3.0
    return y * _THING.inner.scale


def _sets_outside(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _THING.scale += 0.5
    return y * self.thing.scale


def _both(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    _TABLE["scale"] += 1
    self.table["scale"] += 1
    return y * _TABLE["scale"]


def _puts_tensor(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.table["kept"] = y
    made: torch.Tensor = y * _TABLE["kept"]
    return made


def _sets_argument(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    given.scale = 4.0
    return y * self.thing.scale


def _reads_argument(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.thing.scale = 4.0
    return y * given.scale


def _model_in_variable(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.scale = 2.0
    return y * _MODEL[-1].scale


def _buffer_in_variable(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    self.total.add_(1)
    made: torch.Tensor = y * _MODEL[-1].total
    return made


def _only_reads(self: Any, y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
    return y * self.thing.scale * _THING.inner.scale * given.scale * _MODEL[-1].scale


WRITES = [
    _counts, _counts_outside, _sets, _sets_outside, _both, _puts_tensor, _sets_argument, _reads_argument, _model_in_variable,
    _buffer_in_variable,
]  # fmt: skip


class _Whole(nn.Module):
    """Runs in parts where its part cannot be planned."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.part = _Model(compute)

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        loss: torch.Tensor = self.part(x, given)
        return loss


def _made(compute: Callable[..., torch.Tensor]) -> _Whole:
    vars(_THING).update(step=0, scale=1.0)
    _THING.inner.scale = 1.0
    _TABLE.clear()
    _TABLE.update(step=0, scale=1.0)
    torch.manual_seed(0)
    whole = _Whole(compute)
    _MODEL[:] = [whole.part]
    return whole


def _left() -> Any:
    return _THING.step, _THING.scale, _THING.inner.scale, _TABLE["scale"]


def _steps(whole: _Whole) -> list[Any]:
    found = []
    for step in range(6):
        whole.zero_grad()
        loss = whole(rows() + step, _THING)
        loss.backward()
        found.append((loss.item(), whole.part.linear.weight.grad.tolist(), whole.part.total.tolist(), _left()))
    return found


@pytest.mark.parametrize("compute", WRITES)
def test_writes_are_refused(compute: Callable[..., torch.Tensor]) -> None:
    expected, model = _steps(_made(compute)), _made(compute)
    before = _left()
    with pytest.raises(lowtide.CaptureError):
        lowtide.rematerialize(model, (rows(), _THING), budget="100%", on_capture_error="error")
    assert _left() == before
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    assert _steps(model) == expected and not lowtide.plans(model)


def test_what_is_only_read_is_planned() -> None:
    expected, model = _steps(_made(_only_reads)), _made(_only_reads)
    lowtide.rematerialize(model, budget="100%", planner="keep-all", on_capture_error="error")
    assert _steps(model) == expected and len(lowtide.plans(model)) == 1
    _THING.inner.scale = model.part.scale = 2.0
    assert torch.equal(model(rows(), _THING), _Whole.forward(model, rows(), _THING)) and len(lowtide.plans(model)) == 2

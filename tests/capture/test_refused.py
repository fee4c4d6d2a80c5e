"""Operators that are refused by name: the message says which, where, why, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.capture.convert import refused


class _Rolling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(self.linear(x), 1).sum()


@pytest.mark.parametrize("name", ["aten::roll", "aten::roll.default"])
def test_operators_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(refused.REFUSED, name, "turns everything round. Use torch.flip")
    with pytest.raises(
        lowtide.CaptureError, match=r"aten.roll.* at .*test_refused.py:\d+ turns everything .* torch.flip, or"
    ) as caught:
        capture(_Rolling(), (torch.randn(3, 4),))
    assert "test_refused.py" in caught.value.source


def test_other_operators_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(refused.REFUSED, "aten::roll.dims", "is another overload")
    capture(_Rolling(), (torch.randn(3, 4),))


def _with_compiled(compiled: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), compiled, nn.Linear(8, 4), _Rolling())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_modules_with_parameters_are_refused_for_that() -> None:
    with pytest.raises(lowtide.CaptureError, match=r"module '1' is compiled \(torch.jit\) and has parameters"):
        capture(_with_compiled(torch.jit.script(nn.Linear(8, 8))), (torch.randn(3, 4),))
    capture(_with_compiled(torch.jit.script(nn.GELU())), (torch.randn(3, 4),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_with_compiled_modules_run_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 8))
        return nn.Sequential(block, torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4))

    model, plain, x = made(), made(), torch.randn(64, 4)
    lowtide.rematerialize(model, (x,), budget="100%")
    for one in (model, plain):
        one(x).square().sum().backward()
    assert "module '1' is compiled (torch.jit) and has parameters" in caplog.text
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(
        torch.equal(one.grad, other.grad) for one, other in pairs if one.grad is not None and other.grad is not None
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("verb", [lowtide.rematerialize, lowtide.plan])
def test_a_model_that_is_compiled_as_a_whole(verb: Any) -> None:
    with pytest.raises(lowtide.PlanError, match=r"takes the module that a RecursiveScriptModule was compiled from"):
        verb(torch.jit.script(nn.Linear(8, 8)), (torch.randn(3, 8),), budget="100%")


@pytest.mark.parametrize("verb", [lowtide.rematerialize, lowtide.plan])
def test_what_torch_compile_returned(verb: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with pytest.raises(lowtide.PlanError, match=r"takes the model that torch.compile was given, .* _orig_mod"):
        verb(torch.compile(model, backend="eager"), (torch.randn(3, 8),), budget="100%")

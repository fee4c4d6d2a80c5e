"""A model that cannot be captured runs under the online mode instead, where that was asked for."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import lowtide


class _Dynamic(nn.Module):
    """How many layers run depends on the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
            if inputs.mean().item() > 2.0:
                break
        return inputs.sum()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_runs_online_and_equal_to_eager(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, inputs = _Dynamic(), torch.randn(512, 64)
    peak = lowtide.measure(lambda: model(inputs).backward()).peak_bytes
    expected = _gradients(model)
    model.zero_grad()
    budget = peak * 6 // 10
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        lowtide.rematerialize(model, (inputs,), budget=budget, on_capture_error="online")
    try:
        measured = lowtide.measure(lambda: model(inputs).backward()).peak_bytes
        model.zero_grad()
        model(inputs).backward()
        actual = _gradients(model)
    finally:
        lowtide.restore(model)
    assert measured <= budget
    assert len(actual) == len(expected) and all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert [record.message for record in caplog.records if "lowtide.online" in record.message]
    assert torch.equal(model(inputs), _again(model, inputs))


def _again(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(inputs)
    return result


def test_bad_settings_are_refused() -> None:
    model, inputs = _Dynamic(), torch.randn(8, 64)
    with pytest.raises(lowtide.PlanError, match="in bytes"):
        lowtide.rematerialize(model, (inputs,), budget="40%", on_capture_error="online")
    with pytest.raises(lowtide.PlanError, match="on_capture_error"):
        lowtide.rematerialize(model, (inputs,), budget="1MiB", on_capture_error="eager")
    with pytest.raises(lowtide.CaptureError):
        lowtide.rematerialize(model, (inputs,), budget="1MiB", on_capture_error="error")


def test_nothing_is_planned_inside() -> None:
    """Calls of other shapes than the planned ones run within the online budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for rows in (8, 5):
        with lowtide.online("1MiB"):
            model(x[:rows]).square().mean().backward()
            with pytest.raises(lowtide.PlanError, match="outside of lowtide"):
                lowtide.plan(plain, (x,), budget="100%", planner="greedy")
        plain(x[:rows]).square().mean().backward()
    assert len(lowtide.plans(model)) == 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)

"""Plans of all parts of a step together, which are searched for while training runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.parts import joint_search
from tests.support.networks import LookedAt

ROWS, WIDTHS = 512, (32, 48, 64, 80)


def _uneven() -> nn.Module:
    """Blocks of different widths."""
    return LookedAt(
        nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 32))))
        for width in WIDTHS
    )


def _overhead(model: nn.Module) -> float:
    plans = lowtide.plans(model)
    return sum(plan.time_ns for plan in plans) / sum(plan.time_ns / (1 + plan.overhead) for plan in plans)


def test_a_search_that_goes_on_in_later_steps_holds_the_budget_and_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_search, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(joint_search, "_LEAST_SECONDS", 0.0)
    torch.manual_seed(0)
    model, x = _uneven(), torch.randn(ROWS, 32)
    plain = copy.deepcopy(model)
    peak = lowtide.measure(lambda: plain(x).backward()).peak_bytes
    lowtide.rematerialize(model, (x,), budget=peak * 6 // 10, planner="auto{effort=3}", planning="background")
    overheads, search, went_on = [], model.forward.parts.shared.search, False
    for step in range(8):
        plain.zero_grad()
        model.zero_grad()
        loss = plain(x)
        loss.backward()
        results: list[torch.Tensor] = []

        def train(results: list[torch.Tensor] = results) -> None:
            results.append(model(x))
            results[0].backward()

        measured = lowtide.measure(train)
        assert torch.equal(results[0], loss)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
        went_on |= not search.ended
        if step:
            assert measured.peak_bytes <= peak * 6 // 10
            overheads.append(_overhead(model))
    assert went_on and overheads == sorted(overheads, reverse=True)
    assert lowtide.wait(model)
    assert search.ended
    assert _overhead(model) <= overheads[-1]


def test_planning_that_is_waited_for_has_ended_before_training_goes_on() -> None:
    torch.manual_seed(0)
    model, x = _uneven(), torch.randn(ROWS, 32)
    lowtide.rematerialize(model, (x,), budget="60%", planner="auto{effort=3}", planning="wait")
    for _ in range(3):
        model(x).backward()
    assert model.forward.parts.shared.search.ended
    assert len(lowtide.plans(model)) == len(WIDTHS)

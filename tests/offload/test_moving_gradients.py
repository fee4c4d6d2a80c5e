"""Gradients in a file between the backward pass and the optimizer's step: equal to the bit, within a budget that has no room
for all of them, whatever reads and writes them meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import lowtide
from lowtide.ir import Compute, check
from lowtide.ir.graph import SEND_GRADIENT_TARGET
from lowtide.offload.disk import DiskMemory
from lowtide.runtime.updates.away import AwayTensor
from tests.support.wide_layers import LAYERS, WEIGHT_BYTES, WideLayers, batch

Make = Callable[[nn.Module], optim.Optimizer]
_MAKES: dict[str, Make] = {
    "SGD with momentum": lambda m: optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda m: optim.AdamW(m.parameters(), lr=1e-2),
    "fused Adam": lambda m: optim.Adam(m.parameters(), lr=1e-2, fused=True),
}


class Pair:
    """A model in eager, and the same planned so that its gradients have no room in a pass."""

    def __init__(self, folder: Path, make: Make = _MAKES["SGD with momentum"], **more: Any) -> None:
        torch.manual_seed(0)
        self.plain = WideLayers()
        self.planned = copy.deepcopy(self.plain)
        self.eager, self.ours = make(self.plain), make(self.planned)
        self.number = 0
        given = {} if "total_budget" in more else {"budget": 6 * WEIGHT_BYTES}
        options: dict[str, Any] = {"planner": "auto{effort=0}", "offload": f"disk:{folder}", "optimizer": self.ours}
        lowtide.rematerialize(self.planned, (batch(0),), keep_gradients=True, **options, **given, **more)

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.planned

    @property
    def away(self) -> list[AwayTensor]:
        return [p.grad for p in self.planned.parameters() if isinstance(p.grad, AwayTensor)]

    def backward(self) -> None:
        self.number += 1
        losses = [model(batch(self.number)) for model in self.models]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()

    def end(self, **more: Any) -> None:
        for optimizer in (self.eager, self.ours):
            optimizer.step()
        self.check()
        for optimizer in (self.eager, self.ours):
            optimizer.zero_grad(**more)

    def check(self) -> None:
        for theirs, mine in zip(self.plain.parameters(), self.planned.parameters(), strict=True):
            assert torch.equal(theirs, mine)
            assert theirs.grad is not None and mine.grad is not None
            assert torch.equal(theirs.grad, mine.grad)


@pytest.mark.parametrize("make", _MAKES.values(), ids=_MAKES)
def test_clipping_by_the_norm_of_all_holds_one_at_a_time(make: Make, tmp_path: Path) -> None:
    pair = Pair(tmp_path, make)
    (plan,) = lowtide.plans(pair.planned)
    check(plan.graph, plan.schedule)
    targets = [plan.graph.ops[step.op].target for step in plan.schedule.steps if isinstance(step, Compute)]
    assert targets.count(SEND_GRADIENT_TARGET) == LAYERS  # biases are too small
    for _ in range(3):
        pair.backward()
        assert len(pair.away) == LAYERS
        norms: list[torch.Tensor] = [nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)]
        clipped = lowtide.measure(lambda to=norms: to.append(nn.utils.clip_grad_norm_(pair.planned.parameters(), 0.1)))
        assert torch.equal(*norms)
        assert clipped.peak_bytes < 2 * WEIGHT_BYTES
        assert len(pair.away) == LAYERS
        pair.end()
    given = batch(9)
    measured = lowtide.measure(lambda: pair.planned(given).backward())
    assert measured.peak_bytes == plan.peak_bytes <= plan.budget_bytes == 6 * WEIGHT_BYTES
    stepped = lowtide.measure(pair.ours.step)
    assert stepped.peak_bytes < 5 * WEIGHT_BYTES  # two gradients, and what an update takes


def test_where_there_is_room_they_stay(tmp_path: Path) -> None:
    pair = Pair(tmp_path, total_budget="100%")
    pair.backward()
    assert not pair.away
    pair.end()


def test_with_states_that_move(tmp_path: Path) -> None:
    held = sum(p.nbytes for p in WideLayers().parameters()) + batch(0).nbytes
    pair = Pair(tmp_path, _MAKES["AdamW"], total_budget=held + 6 * WEIGHT_BYTES)
    for _ in range(3):
        pair.backward()
        assert len(pair.away) == LAYERS
        pair.end()
    states = [one for state in pair.ours.state.values() for one in state.values() if isinstance(one, AwayTensor)]
    assert len(states) == 2 * LAYERS


def test_passes_that_are_added_up(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for number in range(3):
        with lowtide.accumulating(pair.planned):
            pair.backward()
        pair.backward()
        pair.backward()  # without a word
        pair.end(set_to_none=number != 1)
    pair.backward()
    pair.end()


def test_parameters_frozen_before_the_backward_pass_get_none(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for frozen in (True, False):
        for model in pair.models:
            loss = model(batch(1))
            model.get_submodule("layers.2").requires_grad_(not frozen)
            loss.backward()
            model.requires_grad_(True)
        assert len(pair.away) == LAYERS - frozen
        for optimizer in (pair.eager, pair.ours):
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(*both) for both in zip(*(model.parameters() for model in pair.models), strict=True))


def test_what_reads_and_writes_them(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-4),
        lambda m: [p.grad.data.mul_(0.5) for p in m.parameters()],  # type: ignore[union-attr]
        lambda m: [p.grad.view(-1)[3:].add_(0.1) for p in m.parameters()],  # type: ignore[union-attr]
        lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 0.3),
        lambda m: [p.grad.copy_(torch.sign(p.grad)) for p in m.parameters()],  # type: ignore[union-attr]
        lambda m: [setattr(p, "grad", p.grad * 2) for p in m.parameters()],  # type: ignore[operator]
    ]
    for change in changes:
        pair.backward()
        assert len(pair.away) == LAYERS
        for model in pair.models:
            change(model)
        pair.end()


def test_of_a_gradient_scaler(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**40) for _ in range(2)]  # type: ignore[attr-defined]
    for number in range(3):
        losses = [model(batch(number) * (1e20 if number == 1 else 1)) for model in pair.models]
        for scaler, loss, optimizer in zip(scalers, losses, (pair.eager, pair.ours), strict=True):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for theirs, mine in zip(pair.plain.parameters(), pair.planned.parameters(), strict=True):
            assert torch.equal(theirs, mine)
        pair.eager.zero_grad()
        pair.ours.zero_grad()


def test_one_that_is_held_stays_what_it_was(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.backward()
    held = [[p.grad for p in model.parameters()] for model in pair.models]
    copied = copy.deepcopy(pair.away[0])
    assert type(copied) is torch.Tensor
    pair.end()
    pair.backward()
    pair.end()
    for theirs, mine in zip(*held, strict=True):
        assert theirs is not None and mine is not None
        assert torch.equal(theirs, mine)


def test_restored_they_are_in_memory(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.backward()
    lowtide.restore(pair.planned)
    assert not pair.away
    pair.end()


def test_a_disk_that_fails_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)
    pair.backward()
    pair.end()

    def fail(*_: Any) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(DiskMemory, "_write", fail)
        with pytest.raises(lowtide.ExecutionError, match="no more"):
            pair.backward()
    for optimizer in (pair.eager, pair.ours):
        optimizer.zero_grad()
    pair.backward()
    with monkeypatch.context() as patched:
        patched.setattr(DiskMemory, "_write", fail)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        with pytest.raises(lowtide.ExecutionError, match="no more"):
            nn.utils.clip_grad_norm_(pair.planned.parameters(), 0.1)
    assert len(pair.away) == LAYERS
    pair.planned.zero_grad()
    pair.plain.zero_grad()
    pair.backward()
    pair.end()

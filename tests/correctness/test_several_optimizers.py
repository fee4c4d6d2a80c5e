"""Several optimizers of one model (Muon for matrices, AdamW for the rest), all of which update inside of backward passes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import lowtide
from lowtide.ir.graph import OPTIMIZER_TARGET
from lowtide.program.optimizer_state import optimizer_state_bytes
from lowtide.runtime.updates.away import AwayTensor
from tests.support.wide_layers import WEIGHT_BYTES, WideLayers, batch

Make = Callable[[nn.Module], list[optim.Optimizer]]
WIDTH = 32


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.body:
            h = h + torch.relu(layer(self.norm(h)))
        return self.head(h).square().mean()


class _Normed(optim.SGD):
    """None of those that treat every parameter by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = [*model.named_parameters()]
    matrices = [one for name, one in named if name.startswith("body") and one.dim() == 2]
    return matrices, [one for _, one in named if all(one is not each for each in matrices)]


def _muon_and_adamw(model: nn.Module) -> list[optim.Optimizer]:
    matrices, others = _split(model)
    return [optim.Muon(matrices, 0.02), optim.AdamW([{"params": others[:2], "lr": 0.1}, {"params": others[2:]}], 0.01)]


def _sgd_and_normed(model: nn.Module) -> list[optim.Optimizer]:
    matrices, others = _split(model)
    return [optim.SGD(matrices, 0.1, momentum=0.9), _Normed(others, 0.1)]


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(seed))


class _Pair:
    def __init__(self, make: Make, **options: Any) -> None:
        torch.manual_seed(0)
        plain = _Net()
        planned = copy.deepcopy(plain)
        ours = make(planned)
        lowtide.rematerialize(planned, (_tokens(0),), budget="80%", planner="greedy", optimizer=ours, **options)
        self.runs: list[tuple[nn.Module, list[optim.Optimizer]]] = [(plain, make(plain)), (planned, ours)]
        self.planned = planned

    def each(self, step: Callable[[nn.Module, list[optim.Optimizer]], torch.Tensor]) -> None:
        """Take this step with both, and compare."""
        one, two = (step(*run) for run in self.runs)
        assert torch.equal(one, two)
        _assert_same(*self.runs)

    def updates(self) -> int:
        return sum(op.target == OPTIMIZER_TARGET for op in lowtide.plans(self.planned)[-1].graph.ops)


def _assert_same(
    one: tuple[nn.Module, Sequence[optim.Optimizer]], two: tuple[nn.Module, Sequence[optim.Optimizer]]
) -> None:
    for mine, theirs in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one[1], two[1], strict=True):
        first, second = mine.state_dict(), theirs.state_dict()
        assert str(first["param_groups"]) == str(second["param_groups"])
        assert str(first["state"]) == str(second["state"])
        values = [[v for s in each["state"].values() for v in s.values()] for each in (first, second)]
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*values, strict=True))


def _stepping(seed: int, backwards: bool = False) -> Callable[[nn.Module, list[optim.Optimizer]], torch.Tensor]:
    def step(model: nn.Module, optimizers: list[optim.Optimizer]) -> torch.Tensor:
        loss: torch.Tensor = model(_tokens(seed))
        loss.backward()
        for one in reversed(optimizers) if backwards else optimizers:
            one.step()
        for one in optimizers:
            one.zero_grad()
        return loss.detach()

    return step


def test_all_of_them_update_inside() -> None:
    pair = _Pair(_muon_and_adamw)
    for seed in range(5):
        pair.each(_stepping(seed, backwards=bool(seed % 2)))
    assert pair.updates() == len([*pair.planned.parameters()])


def test_gradients_are_gone_as_with_one() -> None:
    """The same peak as that of one optimizer for all parameters, below that where gradients stay."""
    peaks = []
    for make, options in ((_muon_and_adamw, {}), (_muon_and_adamw, {"keep_gradients": True}), (_one, {})):
        pair = _Pair(make, **options)
        step = _stepping(1)
        for _ in range(2):
            step(*pair.runs[1])
        model, optimizers = pair.runs[1]
        peaks.append(lowtide.measure(lambda: model(_tokens(1)).backward()).peak_bytes)  # noqa: B023
        for each in optimizers:
            each.step()
    assert peaks[0] == peaks[2] < peaks[1]


def _one(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.SGD(model.parameters(), 0.1)]


def test_one_that_needs_all_gradients_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lowtide")
    pair = _Pair(_sgd_and_normed)
    for seed in range(4):
        pair.each(_stepping(seed))
    assert pair.updates() == len(_split(pair.planned)[0])
    assert sum("_Normed is none of torch.optim's" in record.message for record in caplog.records) == 1


def test_accumulation() -> None:
    pair = _Pair(_muon_and_adamw)

    def step(model: nn.Module, optimizers: list[optim.Optimizer]) -> torch.Tensor:
        losses = []
        for seed in range(3):
            if model is pair.planned and seed < 2:
                with lowtide.accumulating(model):
                    losses.append(model(_tokens(seed)))
                    losses[-1].backward()
            else:
                losses.append(model(_tokens(seed)))
                losses[-1].backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        return torch.stack(losses).detach()

    for _ in range(3):
        pair.each(step)


def test_clipping_by_the_norm_of_all() -> None:
    pair = _Pair(_muon_and_adamw, keep_gradients=True)

    def step(model: nn.Module, optimizers: list[optim.Optimizer]) -> torch.Tensor:
        loss: torch.Tensor = model(_tokens(0))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for one in optimizers:
            one.step()
            one.zero_grad()
        return torch.stack([loss.detach(), norm])

    for _ in range(3):
        pair.each(step)


def test_parameters_of_one_are_frozen_in_turn() -> None:
    """As two parts of a model that are trained in turn: only the optimizer of the other one steps."""
    pair = _Pair(_muon_and_adamw)

    def step(model: nn.Module, optimizers: list[optim.Optimizer], chosen: int) -> torch.Tensor:
        for number, parameters in enumerate(_split(model)):
            for one in parameters:
                one.requires_grad_(number == chosen)
        loss: torch.Tensor = model(_tokens(chosen))
        loss.backward()
        optimizers[chosen].step()
        optimizers[chosen].zero_grad()
        return loss.detach()

    for number in range(6):
        pair.each(lambda *run, number=number: step(*run, number % 2))


def test_a_parameter_that_another_one_gets() -> None:
    """Between two steps, and between the passes of one."""
    pair = _Pair(lambda model: [optim.SGD(part, 0.1, momentum=0.9) for part in _split(model)])

    def step(model: nn.Module, optimizers: list[optim.Optimizer], late: bool) -> torch.Tensor:
        first, second = (one.param_groups[0]["params"] for one in optimizers)
        loss: torch.Tensor = model(_tokens(0)) if late else torch.zeros(())
        second.append(first.pop())
        if (state := optimizers[0].state.pop(second[-1], None)) is not None:
            optimizers[1].state[second[-1]] = state
        loss = loss if late else model(_tokens(0))
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        return loss.detach()

    for late in (False, True, False):
        pair.each(lambda *run, late=late: step(*run, late))


def test_schedules_of_each() -> None:
    pair = _Pair(_muon_and_adamw)
    schedules = [
        [optim.lr_scheduler.ExponentialLR(ours[0], 0.5), optim.lr_scheduler.LinearLR(ours[1], 0.1)]
        for _, ours in pair.runs
    ]
    for seed in range(4):
        pair.each(_stepping(seed))
        for each in (one for ours in schedules for one in ours):
            each.step()


def test_one_that_does_not_step() -> None:
    """Its parameters were updated already, so the next backward pass cannot come before its step."""
    pair = _Pair(_muon_and_adamw)
    model, (muon, adamw) = pair.runs[1]
    model(_tokens(0)).backward()
    muon.step()
    muon.zero_grad()
    with pytest.raises(lowtide.ExecutionError, match=r"another one comes before optimizer.step\(\)"):
        model(_tokens(1)).backward()
    adamw.step()


def test_a_pass_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _Pair(_muon_and_adamw)
    pair.each(_stepping(0))
    model, optimizers = pair.runs[1]
    left = [6]
    for one in model.forward.optimizer.of:  # type: ignore[union-attr]
        update = one.update

        def failing(parameter: torch.Tensor, gradient: torch.Tensor, update: Any = update) -> None:
            left[0] -= 1
            if not left[0]:
                raise MemoryError("in the middle")
            update(parameter, gradient)

        monkeypatch.setattr(one, "update", failing)
    with pytest.raises(MemoryError) as caught:
        model(_tokens(1)).backward()
    assert "5 parameters of _Net had been updated before this error" in " ".join(caught.value.__notes__)
    for each in optimizers:
        each.zero_grad()
    _stepping(2)(model, optimizers)
    counts = {int(state["step"]) for state in optimizers[1].state.values()}
    assert counts == {2}


def test_after_restoring() -> None:
    pair = _Pair(_muon_and_adamw)
    pair.each(_stepping(0))
    lowtide.restore(pair.planned)
    for seed in (1, 2):
        pair.each(_stepping(seed))
    assert not any(one._optimizer_step_pre_hooks for one in pair.runs[1][1])


def test_states_of_all_lie_in_a_file(tmp_path: Path) -> None:
    def make(model: nn.Module) -> list[optim.Optimizer]:
        matrices = [one for one in model.parameters() if one.dim() == 2]
        others = [one for one in model.parameters() if one.dim() != 2]
        return [
            optim.Adam(matrices[::2], 1e-2),
            optim.SGD([*matrices[1::2], *others], 1e-2, momentum=0.9),
        ]

    torch.manual_seed(0)
    plain = WideLayers()
    planned = copy.deepcopy(plain)
    eager, ours = make(plain), make(planned)
    held = sum(p.nbytes for p in planned.parameters()) + batch(0).nbytes
    total_bytes = held + 10 * WEIGHT_BYTES
    options: dict[str, Any] = {"planner": "auto{effort=0}", "offload": f"disk:{tmp_path}", "optimizer": ours}
    lowtide.rematerialize(planned, (batch(0),), total_budget=total_bytes, **options)
    for number in range(4):
        losses = [model(batch(number)) for model in (plain, planned)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for one in (*eager, *ours):
            one.step()
            one.zero_grad()
    away = [any(isinstance(v, AwayTensor) for s in one.state.values() for v in s.values()) for one in ours]
    assert away == [True, True]
    _assert_same((plain, eager), (planned, ours))


def test_what_their_states_take() -> None:
    model = _Net()
    optimizers = _muon_and_adamw(model)
    name, nbytes = optimizer_state_bytes(optimizers, model)
    assert name == "Muon and AdamW"
    assert nbytes == sum(optimizer_state_bytes(one, model)[1] for one in optimizers)
    fit = lowtide.fits(model, (_tokens(0),), device="1GiB", optimizer=optimizers)
    assert (fit.optimizer, fit.optimizer_bytes) == (name, nbytes)

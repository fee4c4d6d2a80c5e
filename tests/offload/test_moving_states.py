"""States of an optimizer in a file between the updates of their parameters: equal to the bit, within the total budget, and none
lost, whatever goes wrong."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import lowtide
from lowtide.ir import Compute, check, simulate
from lowtide.ir.graph import FETCH_STATE_TARGET, OPTIMIZER_TARGET, STORE_STATE_TARGET
from lowtide.offload.disk import DiskMemory
from lowtide.runtime.updates.away import AwayTensor
from lowtide.runtime.updates.moving_states import FetchedState, MovingStates
from tests.support.wide import is_wide
from tests.support.wide_layers import LAYERS, ROWS, WEIGHT_BYTES, WIDTH, WideLayers, batch

Make = Callable[[nn.Module], optim.Optimizer]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    return [{"params": matrices}, {"params": vectors, "lr": 0.1}]


_MAKES: dict[str, Make] = {
    "Adam with amsgrad": lambda m: optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "AdamW of two groups": lambda m: optim.AdamW(_groups(m)),
    "SGD with momentum": lambda m: optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "fused Adam": lambda m: optim.Adam(m.parameters(), lr=1e-2, fused=True),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "NAdam": lambda m: optim.NAdam(m.parameters(), lr=1e-3, foreach=True),
}


class Pair:
    """A model in eager, and the same planned so that its optimizer's states have no room beside its passes."""

    def __init__(self, make: Make, folder: Path, *, weights: int = 12, steps: int = 0, **more: Any) -> None:
        torch.manual_seed(0)
        self.plain = WideLayers()
        self.planned = copy.deepcopy(self.plain)
        self.eager, self.ours = make(self.plain), make(self.planned)
        self.number = 0
        for _ in range(steps):
            self.step()
        held = sum(p.nbytes for p in self.planned.parameters()) + batch(0).nbytes
        options: dict[str, Any] = {"planner": "auto{effort=0}", "offload": f"disk:{folder}", "optimizer": self.ours}
        self.total_bytes = held + weights * WEIGHT_BYTES
        lowtide.rematerialize(self.planned, (batch(0),), total_budget=self.total_bytes, **options, **more)

    def losses(self) -> list[torch.Tensor]:
        self.number += 1
        return [model(batch(self.number)) for model in (self.plain, self.planned)]

    def step(self) -> None:
        one, two = self.losses()
        assert torch.equal(one, two)
        for loss in (one, two):
            loss.backward()
        self.end()

    def end(self) -> None:
        for optimizer in (self.eager, self.ours):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Parameters and all of the states are those of eager, and whoever saves them gets them whole."""
        for mine, theirs in zip(self.planned.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        first, second = self.ours.state_dict(), self.eager.state_dict()
        assert list(first["state"]) == list(second["state"])
        for number, state in second["state"].items():
            assert list(state) == list(first["state"][number])
            for key, value in state.items():
                mine = first["state"][number][key]
                assert type(mine) is type(value)
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(value))

    @property
    def away(self) -> list[AwayTensor]:
        return [one for state in self.ours.state.values() for one in state.values() if isinstance(one, AwayTensor)]

    @property
    def there_bytes(self) -> int:
        """Of states that are in memory."""
        tensors = [one for state in self.ours.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
        return sum(one.nbytes for one in tensors if not isinstance(one, AwayTensor))


def _chosen() -> dict[str, Make]:
    return _MAKES if is_wide() else dict([*_MAKES.items()][:2])


@pytest.mark.parametrize("make", _chosen().values(), ids=_chosen())
def test_equal_to_the_bit_and_within_the_total_budget(make: Make, tmp_path: Path) -> None:
    weights = 5 if make in (_MAKES["SGD with momentum"], _MAKES["Adagrad"]) else 12  # of one state or more
    pair = Pair(make, tmp_path, weights=weights)
    (plan,) = lowtide.plans(pair.planned)
    assert "moving states" in str(plan)
    held = pair.total_bytes - weights * WEIGHT_BYTES
    for _ in range(4):
        pair.step()
        assert pair.away
    pair.check()
    given = batch(9)
    measured = lowtide.measure(lambda: pair.planned(given).backward())
    assert measured.peak_bytes == plan.peak_bytes
    assert held + pair.there_bytes + measured.peak_bytes <= pair.total_bytes


def test_the_schedule_fetches_before_each_update_and_stores_after_it(tmp_path: Path) -> None:
    pair = Pair(_MAKES["SGD with momentum"], tmp_path, weights=5)
    (plan,) = lowtide.plans(pair.planned)
    graph = plan.graph
    check(graph, plan.schedule)
    order = [graph.ops[step.op].target for step in plan.schedule.steps if isinstance(step, Compute)]
    assert order.count(FETCH_STATE_TARGET) == order.count(STORE_STATE_TARGET) == LAYERS  # biases are too small
    assert order.count(OPTIMIZER_TARGET) == 2 * LAYERS
    states = [op for op in graph.ops if op.target == FETCH_STATE_TARGET]
    assert [int(plan.costs.storage_bytes[graph.values[op.outputs[0]].storage]) for op in states] == [
        WEIGHT_BYTES
    ] * LAYERS
    run = simulate(graph, plan.costs, plan.schedule)
    assert run.peak_bytes <= plan.budget_bytes
    assert len(run.timing.collectives) == 2 * LAYERS  # beside computing


def test_states_that_are_there_already_leave_before_the_first_pass(tmp_path: Path) -> None:
    pair = Pair(_MAKES["Adam with amsgrad"], tmp_path, weights=14, steps=2)
    assert len(pair.away) == 3 * LAYERS
    pair.step()
    pair.check()


def test_where_there_is_room_nothing_moves(tmp_path: Path) -> None:
    pair = Pair(_MAKES["AdamW of two groups"], tmp_path, weights=60)
    pair.step()
    assert not pair.away
    pair.check()


def test_parameters_frozen_before_the_backward_pass_keep_their_state(tmp_path: Path) -> None:
    pair = Pair(_MAKES["AdamW of two groups"], tmp_path)
    pair.step()
    for frozen in (True, False):
        for model, loss in zip((pair.plain, pair.planned), pair.losses(), strict=True):
            model.get_submodule("layers.2").requires_grad_(not frozen)
            loss.backward()
            model.requires_grad_(True)
        pair.end()
        pair.check()
    assert len(pair.away) == 2 * LAYERS


def test_gradients_that_are_added_up_or_kept(tmp_path: Path) -> None:
    pair = Pair(_MAKES["AdamW of two groups"], tmp_path)  # gradients take 8 weights, and 16 the states
    pair.step()
    with lowtide.accumulating(pair.planned):
        for loss in pair.losses():
            loss.backward()
    pair.step()
    pair.check()
    handles = [model.layers[3].weight.register_hook(lambda g: g * 0.5) for model in (pair.plain, pair.planned)]
    pair.step()
    pair.check()
    for handle in handles:
        handle.remove()
    pair.step()
    pair.check()
    assert len(pair.away) == 2 * LAYERS


def test_clipping_by_the_norm_of_all_gradients(tmp_path: Path) -> None:
    """They are kept, and states come one after the other in the step; there is no room for all of them."""
    pair = Pair(_MAKES["AdamW of two groups"], tmp_path, weights=13, keep_gradients=True)
    (plan,) = lowtide.plans(pair.planned)
    assert "moving states" not in str(plan)
    for _ in range(3):
        for loss in pair.losses():
            loss.backward()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (pair.plain, pair.planned)]
        assert torch.equal(*norms)
        kept = [parameter.grad for parameter in pair.planned.parameters()]
        measured = lowtide.measure(pair.ours.step)
        pair.eager.step()
        assert measured.peak_bytes < 8 * WEIGHT_BYTES  # not the 16 of all states
        assert all(one is two.grad for one, two in zip(kept, pair.planned.parameters(), strict=True))
        assert len(pair.away) == 2 * LAYERS
        pair.eager.zero_grad()
        pair.ours.zero_grad()
    for optimizer in (pair.eager, pair.ours):  # what comes before the step decides about it
        optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.5))
    pair.step()
    pair.check()


def test_gradients_are_kept_for_no_optimizer() -> None:
    with pytest.raises(lowtide.PlanError, match="give optimizer="):
        lowtide.rematerialize(WideLayers(), (batch(0),), budget="100%", keep_gradients=True)


def test_other_sizes_and_other_masks(tmp_path: Path) -> None:
    pair = Pair(_MAKES["AdamW of two groups"], tmp_path)
    for rows in (ROWS, 8, 4, ROWS):
        for model in (pair.plain, pair.planned):
            model(batch(rows, rows)).backward()
        pair.end()
    parameter = next(pair.planned.parameters())
    (gradient,) = torch.autograd.grad(pair.planned(batch(1)), [parameter])
    (expected,) = torch.autograd.grad(pair.plain(batch(1)), [next(pair.plain.parameters())])
    assert torch.equal(gradient, expected)
    pair.step()
    pair.check()


def test_checkpoints_of_one_loop_go_into_the_other(tmp_path: Path) -> None:
    make = _MAKES["Adam with amsgrad"]
    pair = Pair(make, tmp_path, weights=14)
    pair.step()
    file = io.BytesIO()
    torch.save(pair.ours.state_dict(), file)
    saved, whole = torch.load(io.BytesIO(file.getvalue())), copy.deepcopy(pair.ours)
    assert not any(isinstance(v, AwayTensor) for state in whole.state.values() for v in state.values())
    pair.step()
    pair.plain.load_state_dict(pair.planned.state_dict())
    for optimizer in (pair.eager, pair.ours):
        optimizer.load_state_dict(copy.deepcopy(saved))
    pair.step()
    pair.check()
    assert pair.away


def test_states_are_read_and_written_by_whoever_asks(tmp_path: Path) -> None:
    pair = Pair(_MAKES["SGD with momentum"], tmp_path, weights=5)
    pair.step()
    weight, same = pair.planned.layers[0].weight, pair.plain.layers[0].weight
    away, there = pair.ours.state[weight]["momentum_buffer"], pair.eager.state[same]["momentum_buffer"]
    assert isinstance(away, AwayTensor)
    assert float(away.norm()) == float(there.norm())
    assert torch.equal(away + 1, there + 1)
    assert "AwayTensor" in repr(away)
    for one in (away, there):
        one.mul_(0.5)
        one[0] += 1
        one.view(-1)[-1] = 3.0
    assert away.place.here is not None
    assert torch.equal(away + 0, there)
    pair.step()
    pair.check()
    assert not any(one.place.here is not None for one in pair.away)
    lowtide.restore(pair.planned)
    assert not pair.away
    away = pair.ours.state[weight]["momentum_buffer"]
    away.zero_()
    there.zero_()
    pair.step()
    pair.check()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_loses_no_state(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(_MAKES["SGD with momentum"], tmp_path, weights=5)
    pair.step()
    real, left = getattr(os, call), [3]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(5, "Input/output error")
        return real(*args)

    one, two = pair.losses()
    one.backward()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(lowtide.ExecutionError, match="Input/output error") as error:
            two.backward()
    assert any("had been updated before this error" in note for note in error.value.__notes__)
    before = [state["momentum_buffer"].clone() for state in pair.eager.state.values()]
    pair.end()
    updated = 0
    for mine, first, second in zip(pair.ours.state.values(), before, pair.eager.state.values(), strict=True):
        same = torch.equal(mine["momentum_buffer"], second["momentum_buffer"])
        updated += same
        assert same or torch.equal(mine["momentum_buffer"], first)
    assert 0 < updated < 2 * LAYERS


def test_a_budget_that_nothing_meets_says_so_and_moves_nothing(tmp_path: Path) -> None:
    with pytest.raises(lowtide.InfeasibleBudgetError) as error:
        Pair(_MAKES["Adam with amsgrad"], tmp_path, weights=1, steps=1)
    assert error.value.minimum_bytes < sum(p.nbytes for p in WideLayers().parameters()) * 4


def test_a_disk_that_fills_up_later_changes_nothing_for_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(_MAKES["AdamW of two groups"], tmp_path)
    pair.step()
    monkeypatch.setattr(DiskMemory, "free_bytes", lambda memory: 0)
    for model in (pair.plain, pair.planned):  # another program, within the same budget
        model(batch(1, 8)).backward()
    pair.end()
    assert ["moving states" in str(plan) for plan in lowtide.plans(pair.planned)] == [True, True]
    pair.step()
    pair.check()
    assert len(pair.away) == 2 * LAYERS


def test_a_parameter_without_a_state_moves_nothing(tmp_path: Path) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    states = MovingStates(optim.SGD(layer.parameters(), lr=0.1), f"disk:{tmp_path}", [*layer.parameters()])
    states.begin(1.0)
    states.store(FetchedState(layer.weight))()
    assert not states.has_room()
    assert states.movable_bytes(1.0) == 0

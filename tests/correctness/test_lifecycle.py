"""Row: two rematerialized models used in turn; deepcopy; ``state_dict`` round trip; ``.to()`` afterwards; save and reload."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.beside import assert_as_eager
from tests.support.networks import WithLoss, perceptron, rows
from tests.support.records import assert_same_records, run_training, training_step
from tests.support.training import compare_training, make, prepared

_STEP = training_step()


def _network() -> nn.Module:
    return WithLoss(nn.Sequential(perceptron(3), nn.Dropout(0.1), nn.BatchNorm1d(32), perceptron(3)))


def _records(model: nn.Module, iterations: int = 3) -> Any:
    return run_training(model, rows(), _STEP, iterations)


def test_two_models_in_turn() -> None:
    class Both(nn.Module):
        """Only a place to hold two independently prepared models."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _network(), _network()

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        first, second = model.first(*args), model.second(args[0] * 2)
        second.backward()
        first.backward()
        return first, second

    def prepare(model: nn.Module, args: Any, kwargs: Any, *, budget: Any) -> nn.Module:
        lowtide.rematerialize(model.first, args, budget=budget, planner="greedy")
        lowtide.rematerialize(model.second, args, budget=budget, planner="greedy")
        return model

    compare_training(Both, rows(), step=step, prepare=prepare)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_exact_and_independent(how: str, tmp_path: Path) -> None:
    expected = _records(make(_network))
    model = prepared(_network, rows(), "60%")
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(a is not b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    untouched = [p.clone() for p in model.parameters()]
    assert_same_records(_records(twin), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched, strict=True))
    assert_same_records(_records(model), expected)


def test_deepcopy_after_training_steps() -> None:
    model = prepared(_network, rows(), "60%")
    _records(model)
    twin = copy.deepcopy(model)
    assert_same_records(_records(twin), _records(model))


def test_state_dict_round_trip(tmp_path: Path) -> None:
    plain, ours = make(_network), prepared(_network, rows(), "60%")
    assert list(plain.state_dict()) == list(ours.state_dict())
    _records(ours, 2)
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    plain.load_state_dict(state)
    again = prepared(_network, rows(), "60%")
    again.load_state_dict(state)
    expected = _records(plain)
    assert_same_records(_records(again), expected)
    assert_same_records(_records(ours), expected)


def test_assigned_state_dict_and_replaced_parameter() -> None:
    """Parameters replaced after preparation are the ones that are trained."""

    def change(model: nn.Module) -> nn.Module:
        state = {name: tensor.clone() * 0.5 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.body[0][0].weight = nn.Parameter(torch.full((32, 32), 0.01))
        return model

    expected = _records(change(make(_network)))
    assert_same_records(_records(change(prepared(_network, rows(), "60%"))), expected)


def test_to_afterwards() -> None:
    """Another dtype is another signature, planned at the next call."""

    def inputs(iteration: int) -> Any:
        return (rows()(iteration)[0][0].double(),), {}

    plain, ours = make(_network).double(), prepared(_network, rows(), "60%").to(torch.float64)
    expected = run_training(plain, inputs, _STEP, 3)
    assert_same_records(run_training(ours, inputs, _STEP, 3), expected)
    assert len(lowtide.plans(ours)) == 2


def test_parameter_data_moved_and_back() -> None:
    """``.to()`` swaps the parameters' data in place; the program must read the new data."""
    ours = prepared(_network, rows(), "60%")
    _records(ours, 1)
    ours.double().float()
    plain = make(_network)
    _records(plain, 1)
    plain.double().float()
    assert_same_records(_records(ours), _records(plain))


def test_restore() -> None:
    model = make(_network)
    attributes = set(vars(model))
    lowtide.rematerialize(model, *rows()(0), budget="60%", planner="greedy")
    _records(model, 1)
    lowtide.restore(model)
    assert set(vars(model)) == attributes
    plain = make(_network)
    _records(plain, 1)
    assert_same_records(_records(model), _records(plain))


def test_a_restored_model_is_gone_with_the_last_reference() -> None:
    """Without Python's collector of garbage, as without lowtide."""
    model = prepared(_network, rows(), "70%")
    _records(model, 1)
    known = weakref.ref(model)
    gc.disable()
    try:
        lowtide.restore(model)
        del model
        assert known() is None
    finally:
        gc.enable()


def test_restore_and_plan_again() -> None:
    model = prepared(_network, rows(), "70%")
    lowtide.restore(model)
    lowtide.rematerialize(model, *rows()(0), budget="50%", planner="greedy")
    assert_same_records(_records(model), _records(make(_network)))


def test_forward_hooks_on_the_model() -> None:
    """Hooks on the prepared model itself fire once per call, as in eager."""
    counts = {"pre": 0, "post": 0}

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        handles = [
            model.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
            model.register_forward_hook(lambda m, a, y: y * 3),
        ]
        counts["pre"] += 1
        loss = model(*args)
        loss.backward()
        for handle in handles:
            handle.remove()
        return loss

    compare_training(_network, rows(), step=step, check_peak=False, budgets=("60%",))


def test_forward_hooks_registered_before() -> None:
    """They run around the planned forward, not inside it too."""

    def network() -> nn.Module:
        model = _network()
        model.register_forward_hook(lambda m, a, y: y * 3)
        return model

    compare_training(network, rows(), budgets=("60%",), check_peak=False)


def test_optimizer_made_before_and_after() -> None:
    """Adam over the prepared model's parameters: the same parameters, the same trajectory."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(5)
        for iteration in range(4):
            optimizer.zero_grad()
            model(*rows()(iteration)[0]).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain = make(_network)
    expected = train(plain, torch.optim.Adam(plain.parameters()))
    before = make(_network)
    optimizer = torch.optim.Adam(before.parameters())
    lowtide.rematerialize(before, *rows()(0), budget="60%", planner="greedy")
    after = prepared(_network, rows(), "60%")
    for found in (train(before, optimizer), train(after, torch.optim.Adam(after.parameters()))):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_deepcopy_of_a_container() -> None:
    """Containers have a length, which a model under construction cannot answer."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    x = torch.randn(8, 32)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    clone = copy.deepcopy(model)
    for copied in (model, clone):
        copied(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), clone.parameters(), strict=True))
    assert lowtide.plans(clone)[0] is not lowtide.plans(model)[0]


def test_inputs_are_let_go_when_their_gradients_are_made() -> None:
    """As in eager: what an earlier part of a model made does not live as long as the loss."""
    first, second = nn.Linear(32, 32), _network()
    lowtide.rematerialize(second, (torch.randn(8, 32, requires_grad=True),), budget="100%", planner="keep-all")
    hidden = first(torch.randn(8, 32))
    alive = weakref.ref(hidden)
    loss = second(hidden)
    del hidden
    loss.backward(retain_graph=True)
    assert alive() is not None
    loss.backward()
    assert alive() is None
    assert loss.grad_fn is not None


def _swapping_step(model: Any, number: int) -> torch.Tensor:
    """``swap_tensors`` refuses tensors that weak references are left of, in garbage too."""
    if number == 2:
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(4, 4)))
    model.zero_grad()
    out: torch.Tensor = model(torch.ones(3, 4))
    out.sum().backward()
    return out


def test_parameters_are_swapped() -> None:
    gc.collect()
    gc.disable()
    try:
        assert_as_eager(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), _swapping_step)
    finally:
        gc.enable()

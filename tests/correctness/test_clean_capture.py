"""Capturing and profiling change nothing of the user's: parameters, buffers, generators, hooks, ``.grad``, flags, memory."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import WithLoss, perceptron, rows
from tests.support.training import make


class _Watched(nn.Module):
    """Counts its calls in plain Python and in a buffer, draws random numbers, and remembers its last result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(perceptron(3), nn.BatchNorm1d(32), nn.Dropout(0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        y = self.body(x)
        self.last = y.detach()
        return y.square().mean()


def _everything(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules())
    return {
        "tensors": {n: (id(t), t._version, t.detach().clone()) for n, t in model.state_dict(keep_vars=True).items()},
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "flags": {n: (m.training, type(m), sorted(k for k in vars(m) if k != "forward")) for n, m in modules.items()},
        "hooks": {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for n, m in modules.items()
        },
        "children": list(modules),
    }


def _assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, tuple):
        for a, b in zip(left, right, strict=True):
            _assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("entry", ["rematerialize", "plan"])
def test_preparation_changes_nothing(entry: str) -> None:
    model = make(_Watched)
    (x,), _ = rows(requires_grad=True)(0)
    torch.manual_seed(4)
    random.seed(4)
    before, generator, python = _everything(model), torch.get_rng_state(), random.getstate()
    values, version = x.detach().clone(), x._version
    getattr(lowtide, entry)(model, (x,), {}, budget="70%", planner="greedy")
    _assert_same(_everything(model), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert model.calls == 0
    assert model.last is None
    assert x.grad is None
    assert x._version == version
    assert torch.equal(x, values)


def test_existing_gradients_survive() -> None:
    model = make(_Watched)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = {name: p.grad for name, p in model.named_parameters()}
    lowtide.rematerialize(model, *rows()(0), budget="70%", planner="greedy")
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_deterministic_and_thread_settings_survive() -> None:
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled())
    lowtide.rematerialize(make(_Watched), *rows()(0), budget="70%", planner="greedy")
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()) == before


def _live_tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            # What is kept of a call knows the sizes of storages, but has no memory.
            with contextlib.suppress(RuntimeError):
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_no_activation_memory_is_kept_after_preparation() -> None:
    def network() -> nn.Module:
        return WithLoss(perceptron(6))

    model = make(network)
    inputs = rows(4096)(0)
    before = _live_tensor_bytes()
    lowtide.rematerialize(model, *inputs, budget="60%", planner="greedy")
    assert _live_tensor_bytes() == before


def test_no_activation_memory_is_kept_after_a_step() -> None:
    model = make(lambda: WithLoss(nn.Sequential(perceptron(6), nn.Dropout(0.1))))
    inputs = rows(4096)(0)
    lowtide.rematerialize(model, *inputs, budget="60%", planner="greedy")
    model(*inputs[0]).backward()
    before = _live_tensor_bytes()

    def step_and_forward() -> None:
        model(*inputs[0]).backward()
        model(*inputs[0])

    assert lowtide.measure(step_and_forward).final_bytes == 0
    assert _live_tensor_bytes() == before

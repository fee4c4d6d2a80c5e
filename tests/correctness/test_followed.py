"""Tensors in plain attributes that change are inputs of the program, as buffers are: hidden states, running means, parameters
that are not registered, and what is set anew before every call."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import lowtide
from tests.support.records import training_step
from tests.support.training import BUDGETS, MINIMUM, compare_training, make

WIDTH = 32
Use = Callable[[Any, torch.Tensor], torch.Tensor]


class _Model(nn.Module):
    """``use(self, h)`` computes with plain attributes in the middle of it."""

    def __init__(self, use: Use, **attributes: Any) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.after = copy.deepcopy(self.before)
        self.use = use
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.use(self, self.before(x))).square().mean()


def _inputs(iteration: int) -> Any:
    return (torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(iteration)),), {}


def _hidden(model: Any, h: torch.Tensor) -> torch.Tensor:
    """As a recurrent network that keeps its state from batch to batch."""
    before = torch.zeros(WIDTH) if model.hidden is None else model.hidden
    model.hidden = (0.5 * before + h.mean(0)).detach()
    return h + before


def _pair(model: Any, h: torch.Tensor) -> torch.Tensor:
    hidden, cell = model.state
    model.state = ((hidden + h.mean(0)).detach(), cell * 0.5 + 1)
    return h * cell + hidden


def _item(model: Any, h: torch.Tensor) -> torch.Tensor:
    result = h + model.table["mean"]
    model.table["mean"] = h.mean(0).detach()
    return result


def _field(model: Any, h: torch.Tensor) -> torch.Tensor:
    result = h + model.box.mean
    model.box.mean = h.mean(0).detach()
    return result


def _written(model: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        model.calls += 1
    return (h - model.mean) / model.calls


def _unregistered(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * model.scales[0]


def _moved(model: Any, h: torch.Tensor) -> torch.Tensor:
    """From one attribute to another one; nothing is computed with them."""
    model.earlier, model.latest = model.latest, h.mean(0).detach()
    return h


def _bounded(model: Any, h: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = h + torch.stack(list(model.queue)).sum(0)
    model.queue.append(h.mean(0).detach())
    return result


def _rotated(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.rows.pop(0)
    model.rows.append(h.mean(0).detach())
    return h * model.rows[0]


def _slices(model: Any, h: torch.Tensor) -> torch.Tensor:
    """A queue of keys, as MoCo has it."""
    with torch.no_grad():
        model.keys[:4] = h[:4]
    return h + model.keys.mean(0)


def _memory(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.memory = torch.cat([model.memory, h.detach()])[-8:]
    return h + model.memory.mean(0)


def _threshold(model: Any, h: torch.Tensor) -> torch.Tensor:
    """A constant: a question about its value has an answer."""
    return h.sin() if model.threshold.item() > 0.5 else h


CASES: dict[Use, Callable[[], dict[str, Any]]] = {
    _hidden: lambda: {"hidden": None},
    _pair: lambda: {"state": (torch.zeros(WIDTH), torch.ones(WIDTH))},
    _item: lambda: {"table": {"mean": torch.zeros(WIDTH)}},
    _field: lambda: {"box": SimpleNamespace(mean=torch.zeros(WIDTH))},
    _written: lambda: {"mean": torch.zeros(WIDTH), "calls": torch.zeros(())},
    _unregistered: lambda: {"scales": [nn.Parameter(torch.full((WIDTH,), 0.5))]},
    _moved: lambda: {"earlier": torch.zeros(WIDTH), "latest": torch.ones(WIDTH)},
    _bounded: lambda: {"queue": deque([torch.zeros(WIDTH)] * 3, maxlen=3)},
    _rotated: lambda: {"rows": [torch.full((WIDTH,), float(i)) for i in range(3)]},
    _slices: lambda: {"keys": torch.zeros(8, WIDTH)},
    _memory: lambda: {"memory": torch.zeros(8, WIDTH)},
    _threshold: lambda: {"threshold": torch.tensor(0.7)},
}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, SimpleNamespace):
        yield from _tensors(vars(value))
    elif isinstance(value, (tuple, list, deque, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _kept(model: nn.Module, names: Any) -> list[torch.Tensor]:
    found = [tensor for name in names for tensor in _tensors(getattr(model, name))]
    return [t for tensor in found for t in (tensor.detach().clone(), tensor.grad) if t is not None]


@pytest.mark.parametrize("use", CASES, ids=lambda use: use.__name__)
def test_as_eager_to_the_bit(use: Use) -> None:
    def step(model: nn.Module, *args: Any) -> Any:
        before = [[*_tensors(getattr(model, name))] for name in CASES[use]()]
        result = train(model, *args)
        del before  # until here, or what the call replaces would be freed during it, which no plan counts on
        return result

    train = training_step()
    budgets = ("70%", MINIMUM) if use is _memory else BUDGETS
    assert compare_training(lambda: _Model(use, **CASES[use]()), _inputs, step=step, budgets=budgets, iterations=4)


@pytest.mark.parametrize("use", CASES, ids=lambda use: use.__name__)
def test_what_is_kept(use: Use) -> None:
    """After every call, for calls of several shapes, with few plans more than shapes."""
    plain, planned = (make(lambda: _Model(use, **CASES[use]())) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for iteration, rows in enumerate((256, 256, 64, 256, 64)):
        for model in (plain, planned):
            model(_inputs(iteration)[0][0][:rows]).backward()
        assert_close(_kept(planned, CASES[use]()), _kept(plain, CASES[use]()), rtol=0, atol=0)
    assert len(lowtide.plans(planned)) <= 2 + 2 * (use in (_hidden, _bounded))


def test_nothing_is_captured_again_for_other_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """Once, until it is known that they change."""
    plain, planned = (make(lambda: _Model(lambda model, h: h * model.condition)) for _ in range(2))
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for iteration in range(5):
            for model in (plain, planned):
                model.condition = torch.randn(WIDTH, generator=torch.Generator().manual_seed(iteration))
                if model is planned and iteration == 0:
                    lowtide.rematerialize(planned, _inputs(0)[0], budget="90%", planner="greedy")
                model.zero_grad()
                model(*_inputs(iteration)[0]).backward()
            for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
                assert torch.equal(expected.grad, found.grad)
    assert caplog.text.count("captured again") == 1


def test_one_tensor_in_two_attributes() -> None:
    """While it is one, and when it is two."""

    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        return h * model.one + model.two

    plain, planned = (make(lambda: _Model(use)) for _ in range(2))
    for model in (plain, planned):
        model.one = model.two = torch.ones(WIDTH)
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for iteration in range(5):
        for model in (plain, planned):
            model.one = torch.full((WIDTH,), float(iteration))
            if iteration % 2:
                model.two = model.one
            model.zero_grad()
            model(*_inputs(iteration)[0]).backward()
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_one_backward_pass_through_several_calls() -> None:
    """Through what they leave to each other."""

    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        before = torch.zeros(WIDTH) if model.hidden is None else model.hidden
        model.hidden = h.mean(0)
        return h + before

    plain, planned = (make(lambda: _Model(use, hidden=None)) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for _ in range(2):
        for model in (plain, planned):
            model.hidden = None
            model.zero_grad()
            torch.stack([model(*_inputs(call)[0]) for call in range(3)]).sum().backward()
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_state_that_is_not_detached() -> None:
    """One backward pass through three calls, with gradients that need a plan of their own."""

    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = h + model.hidden
        model.hidden = result.mean(0)
        return result

    class Whole(_Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.use(self, self.before(x))

    plain, planned = (make(lambda: Whole(use)) for _ in range(2))
    for model in (plain, planned):
        model.hidden = torch.zeros(WIDTH)
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for _ in range(2):
        for model in (plain, planned):
            model.hidden = torch.zeros(WIDTH)
            model.zero_grad()
            sum((model(*_inputs(call)[0]).sum() for call in range(3)), torch.zeros(())).backward()
        for expected, found in zip(plain.before.parameters(), planned.before.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_values_that_decide() -> None:
    """A tensor of several elements that is set before every call, and whose values the program depends on."""

    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        return h * 2 if (model.threshold > 0.5).all() else h

    plain, planned = (make(lambda: _Model(use, threshold=torch.zeros(2))) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for iteration in range(4):
        for model in (plain, planned):
            model.threshold = torch.full((2,), float(iteration % 2))
            model.zero_grad()
            model(*_inputs(iteration)[0]).backward()
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_a_view_of_a_buffer_that_is_written() -> None:
    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.bank[0].copy_(h.mean(0))
        return h + model.row

    model = make(lambda: _Model(use))
    model.register_buffer("bank", torch.zeros(3, WIDTH))
    model.row = model.bank[0]
    with pytest.raises(lowtide.CaptureError, match="several buffers or arguments share"):
        lowtide.rematerialize(model, _inputs(0)[0], budget="100%", planner="keep-all", on_capture_error="error")


def test_computed_by_a_hook_of_the_model() -> None:
    """As ``weight_norm`` of the model has it: its gradient goes on from there."""

    class Root(_Model):
        def __init__(self) -> None:
            super().__init__(lambda model, h: h * model.scale)
            self.logarithm = nn.Parameter(torch.zeros(WIDTH))
            self.scale = self.logarithm.exp()
            self.register_forward_pre_hook(lambda module, args: setattr(module, "scale", module.logarithm.exp()))

    compare_training(Root, _inputs, budgets=("80%",), check_peak=False)


def test_a_teacher_that_is_not_registered() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.net(x) - self.teacher[0](x).detach() * 2).square().mean()

    compare_training(Student, _inputs, budgets=("80%", MINIMUM), quick=0)


def test_a_hidden_parameter_that_is_replaced() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.net(x) - self.teacher[0](x)).square().mean()

    plain, planned = (make(Student) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all")
    for iteration in range(3):
        for model in (plain, planned):
            model.teacher[0].weight = nn.Parameter(torch.full((WIDTH, WIDTH), float(iteration)), requires_grad=False)
            model.zero_grad()
            model(*_inputs(0)[0]).backward()
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def _with_more(model: Any, h: torch.Tensor) -> torch.Tensor:
    """Beside tensors that it does not read, and one that requires gradients."""
    return _slices(model, h)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_gradients_with_tensors_that_are_not_read(compiler: str) -> None:
    """Another program for the same call has its inputs in its own order."""

    class Whole(_Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.use(self, self.before(x))
            self.left = h.mean()
            return h

    def whole() -> nn.Module:
        model = Whole(_with_more, unread=torch.ones(5), keys=torch.zeros(8, WIDTH), other=[torch.ones(3)])
        model.after = nn.Identity()
        return model

    plain, planned = (make(whole) for _ in range(2))
    lowtide.rematerialize(planned, _inputs(0)[0], budget="100%", planner="keep-all", compiler=compiler)
    for iteration in range(3):
        for model in (plain, planned):
            model.zero_grad()
            h = model(*_inputs(iteration)[0])
            (h.sum() if iteration else h.square().mean()).backward()
        closeness = {"rtol": 0, "atol": 0} if compiler == "eager" else {"rtol": 1e-4, "atol": 1e-4}
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert_close(found.grad, expected.grad, **closeness)
        assert_close(planned.keys, plain.keys, **closeness)


def test_what_is_measured_writes_nothing() -> None:
    def use(model: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.keys[0] = h.mean(0)
        return h + model.keys.sum(0)

    model = make(lambda: _Model(use, keys=torch.zeros(8, WIDTH)))
    lowtide.max_batch(
        lambda batch: ((torch.ones(batch, WIDTH),), {}), model, budget="32KiB", max_overhead=0.5, limit=32
    )
    assert not model.keys.any()


def test_a_planned_forward_that_a_wrapper_keeps() -> None:
    """accelerate's mixed precision keeps it in an attribute; what it holds is no state of the model."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    model._original_forward = model.forward
    for rows in (16, 8, 16, 8):
        for requires_grad in (True, False):
            x = torch.randn(rows, 16, requires_grad=requires_grad)
            found = []
            for each in (model, plain):
                each.zero_grad()
                each(x).square().mean().backward()
                found.append([parameter.grad for parameter in each.parameters()])
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


class _LooksInside(nn.Module):
    """Finds its submodules by its own ``__getattr__``, and has one."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["_modules"].get(name)
        return super().__getattr__(name) if found is None else found

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.tanh() if self.inner is None else self.inner(h)


def test_modules_inside_of_one_that_is_not_registered() -> None:
    """A library may keep them beside a module that it calls with other parameters."""
    inner = _LooksInside(nn.Sequential(_LooksInside()))

    def factory() -> nn.Module:
        return _Model(lambda model, h: model.before[0](model.kept[0](h)), kept=[_LooksInside(inner)])

    assert compare_training(factory, _inputs, budgets=("100%",))

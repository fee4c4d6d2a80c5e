"""Models whose backward passes are differentiated again: gradient penalties, differential equations, learning to learn."""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import lowtide
from lowtide.api import runtime_of
from lowtide.runtime.calls.differentiated import is_named
from tests.support.beside import assert_as_eager
from tests.support.networks import generator
from tests.support.training import compare_training, make

Step = Callable[[nn.Module], torch.Tensor]
WIDTH = 64


class _Blocks(nn.Module):
    """Residual blocks with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 256), nn.BatchNorm1d(256), nn.Softplus(), nn.Dropout(0.1), nn.Linear(256, WIDTH)
            )
            for _ in range(6)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.sum(1, keepdim=True)


def _penalty(model: nn.Module) -> torch.Tensor:
    """Gulrajani et al. 2017: a critic's norm of gradients, beside calls that are not differentiated again."""
    real, fake = torch.randn(128, WIDTH), torch.randn(128, WIDTH)
    between = torch.lerp(real, fake, torch.rand(128, 1)).requires_grad_()
    loss = model(fake).mean() - model(real).mean()
    (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return loss + 10 * (gradient.norm(dim=1) - 1).square().mean()


def _equation(model: nn.Module) -> torch.Tensor:
    """Raissi et al. 2019: the residual of an equation has second derivatives, and the solution itself."""
    x = torch.randn(128, WIDTH, requires_grad=True)
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (u * first - 0.1 * second).square().mean() + model(torch.zeros(32, WIDTH)).square().mean()


def _learning_to_learn(model: nn.Module) -> torch.Tensor:
    """Finn et al. 2017: through a step of gradient descent."""
    parameters = dict(model.named_parameters())
    loss = functional_call(model, parameters, (torch.randn(64, WIDTH),)).square().mean()
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    moved = {name: one - 0.1 * g for (name, one), g in zip(parameters.items(), gradients, strict=True)}
    return functional_call(model, moved, (torch.randn(64, WIDTH),)).square().mean()


def _product_with_hessian(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(64, WIDTH)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum((each * each.detach()).sum() for each in gradients)


def _now_and_then(model: nn.Module) -> torch.Tensor:
    """Karras et al. 2020: most steps have no penalty, and what it is of are calls like the others."""
    loss = model(torch.randn(64, WIDTH)).square().mean()
    return loss + _product_with_hessian(model) if torch.initial_seed() == 2 else loss


def _train(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = step(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = _Blocks()
    return plain, copy.deepcopy(plain)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def _assert_alike(step: Step, plain: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps are equal to the bit in the loss, parameters, buffers and the generator."""
    other = _optimizer(plain)
    for number in range(3):
        torch.manual_seed(number)
        loss, state = _train(step, plain, other), torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(_train(step, model, optimizer), loss)
        assert torch.equal(torch.get_rng_state(), state)
    for one, two in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("updates", [False, True], ids=["", "with optimizer="])
@pytest.mark.parametrize("step", [_penalty, _equation, _learning_to_learn, _product_with_hessian, _now_and_then])
def test_training_is_equal_to_the_bit(step: Step, updates: bool, caplog: pytest.LogCaptureFixture) -> None:
    plain, model = _pair()
    optimizer = _optimizer(model)
    options: dict[str, Any] = {"optimizer": optimizer} if updates else {}
    lowtide.rematerialize(model, budget="100%", planner="greedy", **options)
    _assert_alike(step, plain, model, optimizer)
    assert "run by its own code" in caplog.text


def _updating_pair() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """The second one is updated inside of its backward passes."""
    plain, model = _pair()
    optimizer = _optimizer(model)
    lowtide.rematerialize(model, budget="100%", planner="greedy", optimizer=optimizer)
    return plain, model, optimizer


def test_a_penalty_comes_when_updates_are_planned() -> None:
    """In some later step: what the loss adds to the same gradients is not updated with, though it was to be."""
    plain, model, optimizer = _updating_pair()

    def step(model: nn.Module) -> torch.Tensor:
        loss = model(torch.randn(64, WIDTH)).square().mean()
        if torch.initial_seed() < 2:
            return loss
        x = torch.randn(64, WIDTH, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss + gradient.square().mean()

    _assert_alike(step, plain, model, optimizer)


def test_a_call_by_its_own_code_adds_to_the_same_gradients() -> None:
    """Where code names it, and nothing is differentiated again, the first call of a kind still is no part of any plan."""
    plain, model, optimizer = _updating_pair()

    def step(model: nn.Module) -> torch.Tensor:
        loss = model(torch.randn(64, WIDTH)).square().mean()
        return loss + model(torch.randn(64, WIDTH)).mean() if torch.initial_seed() == 2 else loss

    _assert_alike(step, plain, model, optimizer)


def test_calls_that_are_not_differentiated_again_are_planned() -> None:
    """Though code around them names it: from the second one on."""
    plain, model = _pair()
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    _assert_alike(lambda model: model(torch.randn(64, WIDTH)).square().mean(), plain, model, _optimizer(model))
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.ran == 2
    assert not runtime.differentiated.any


def test_only_calls_that_are_differentiated_again_run_without_a_plan() -> None:
    """Of a critic, those for the penalty: in three steps, and the first of the others, that might have been some."""
    _, model = _pair()
    lowtide.rematerialize(model, (torch.randn(128, WIDTH),), budget="100%", planner="greedy")
    for _ in range(3):
        _penalty(model).backward()
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.ran == 2 * 2  # two calls in two steps


def test_calls_that_no_backward_pass_comes_to_are_planned() -> None:
    """From a few steps on: samples for a critic are detached from the generator that made them."""
    plain, model = _pair()
    critic, ran = nn.Linear(1, 1), []
    lowtide.rematerialize(model, budget="100%", planner="greedy")

    def step(model: nn.Module) -> torch.Tensor:
        fake = model(torch.randn(64, WIDTH)).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(fake).square().sum(), fake, create_graph=True)
        return gradient.square().mean()

    for number in range(6):
        losses = []
        for one in (plain, model):
            torch.manual_seed(number)
            losses.append(step(one))
        assert torch.equal(*losses)
        ran.append(runtime_of(model).ran)  # type: ignore[union-attr]
    assert ran == [0, 0, 0, 1, 2, 3]
    for one, two in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("grad(y, x, create_graph=True)", True),
        ("y.backward(**{'create_graph': True})", True),
        ("[grad(one, x, create_graph=True) for one in y]", True),
        ("grad(y, x, retain_graph=True)", False),
    ],
)
def test_code_that_differentiates_again_names_it(code: str, named: bool) -> None:
    """In the module of a caller, whichever of its functions."""
    module: dict[str, Any] = {"__name__": "loop", "_getframe": sys._getframe}
    exec(f"def penalty(x, y):\n    return {code}\ndef train():\n    return _getframe()", module)
    assert is_named(_alone(module["train"]())) is named


@pytest.mark.parametrize("how", ["penalty(y, x)", "other.penalty(y, x)", "other.twice(y, x)"])
def test_code_that_is_called_names_it(how: str) -> None:
    """In another module, whose functions the code names."""
    other: Any = types.ModuleType("other")
    exec("def penalty(y, x): return grad(y, x, create_graph=True)\ndef twice(y, x): return penalty(y, x)", vars(other))
    module: dict[str, Any] = {"__name__": "loop", "_getframe": sys._getframe, "other": other}
    exec(f"def step(y, x): {how}\ndef train(): return _getframe()", module)
    if how.startswith("penalty"):
        assert not is_named(_alone(module["train"]()))
        module["penalty"] = other.penalty
    assert is_named(_alone(module["train"]()))


@pytest.mark.parametrize("how", ["penalty(y)", "loss(y)", "trainer.loss(y)", "other.penalty(y)", "late(y)", "model(y)"])
def test_code_that_a_loop_is_given_names_it(how: str) -> None:
    """In a script without functions, and in a trainer that has the loss in an attribute. What the planned model does is in its
    plans."""
    other: Any = types.ModuleType("other")
    penalty = "def penalty(y): return grad(y, create_graph=True)"
    exec(f"{penalty}\nclass Loss:\n    def __call__(self, y): return penalty(y)", vars(other))
    given = {"penalty": other.penalty, "loss": other.Loss(), "late": functools.partial(other.penalty), "other": other}
    given |= {"trainer": types.SimpleNamespace(loss=given["loss"]), "model": other.Loss()}
    given["model"].forward = None

    class Unbound:
        """As proxies of values that are there later."""

        __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    given["proxy"] = Unbound()
    module: dict[str, Any] = {"__name__": "script", "_getframe": sys._getframe, **given}
    exec(f"frame = _getframe()\nif frame is None: {how}, proxy", module)
    assert is_named(_alone(module["frame"])) is not how.startswith("model")


def test_looking_at_variables_of_callers_keeps_nothing() -> None:
    held = torch.zeros(3)
    there = weakref.ref(held)
    is_named(sys._getframe(), _alone.__code__)
    del held
    assert there() is None


def _alone(frame: Any) -> Any:
    """The frame as the outermost one: this module names it, too."""

    class Frame:
        f_code, f_globals, f_locals, f_back = frame.f_code, frame.f_globals, frame.f_locals, None

    return Frame


class _Forces(nn.Module):
    """Has the positions among its arguments require a gradient, and learns an energy and its gradient by them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 256), nn.Softplus(), nn.Linear(256, 256), nn.Tanh()
        )
        self.head = nn.Linear(256, 1)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        assert data["place"].dim() == 2 and len(data["place"]) == data["force"].size(0)
        data["place"].requires_grad_(False)  # once more otherwise, before anything reads it
        data["place"].requires_grad_(True)
        with torch.enable_grad():
            energy = self.head(self.body(data["place"]))
            (gradient,) = torch.autograd.grad(energy.sum(), data["place"], create_graph=True)
        return energy.square().mean() + (gradient + data["force"]).square().mean()


def _places(iteration: int, count: int = 64) -> Any:
    place, force = torch.randn(2, count, WIDTH, generator=generator(iteration))
    return ({"place": place, "force": force},), {}


def test_an_argument_that_is_to_require_a_gradient() -> None:
    compare_training(_Forces, _places, budgets=("85%", "75%"))


def test_arguments_that_come_to_require_a_gradient_are_left_so() -> None:
    """As eager does, with their gradients; the sample is not. Calls of a shape are captured once."""
    plain, model = (make(_Forces) for _ in range(2))
    (sample,), _ = _places(0)
    lowtide.rematerialize(model, (sample,), budget="75%", on_capture_error="error")
    assert not sample["place"].requires_grad
    for step in range(5):
        theirs, ours = (_places(step, count=48 if step == 3 else 64)[0][0] for _ in range(2))
        for one, data in ((plain, theirs), (model, ours)):
            one.zero_grad()
            one(data).backward()
        assert ours["place"].requires_grad
        assert torch.equal(ours["place"].grad, theirs["place"].grad)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert len(lowtide.plans(model)) == 2


class _Frozen(nn.Module):
    """Freezes a weight while a flag, or the number of its calls, says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.frozen, self.calls = True, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.frozen:
            self.first.weight.requires_grad_(False)
        elif self.calls > 8:
            self.first.weight.requires_grad_(self.calls % 4 > 1)
        return self.second(torch.tanh(self.first(x)))


def test_weights_that_are_frozen_until_a_flag_says_otherwise() -> None:
    """By the user, between two calls, or by the forward pass itself."""

    def step(model: Any, number: int) -> list[bool]:
        if number == 3:
            model.frozen = False
            model.requires_grad_(True)
        model.zero_grad()
        model(torch.randn(16, WIDTH, generator=generator(number))).square().mean().backward()
        return [one.requires_grad for one in model.parameters()]

    assert_as_eager(_Frozen, step, 18)


class _Absent:
    """A proxy of what is not there yet, as web frameworks have them for requests."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of any request")


def test_proxies_that_cannot_be_asked_for_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = _Absent()
    monkeypatch.setitem(globals(), "absent", absent)

    def step() -> bool:
        return absent is not None and is_named(sys._getframe())

    assert isinstance(step(), bool)

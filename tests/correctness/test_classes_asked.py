"""Code that asks for the class of a tensor, or whether it is a parameter or a leaf, is told what eager code is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowtide


class _Asking(nn.Module):
    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y * 3 if self.asks(self, x, y) else y).square().mean()


def _is_tensor(value: Any) -> bool:
    return type(value) == torch.Tensor  # noqa: E721


_QUESTIONS = {
    "type is": lambda model, x, y: type(y) is torch.Tensor,
    "type of an argument": lambda model, x, y: type(x) is torch.Tensor,
    "type, in a function": lambda model, x, y: _is_tensor(y),
    "type as a key": lambda model, x, y: {torch.Tensor: True}.get(type(y), False),
    "type handed on": lambda model, x, y: list(map(type, [x, y])) == [torch.Tensor] * 2,
    "name of the type": lambda model, x, y: type(y).__name__ == "Tensor",
    "type as a class": lambda model, x, y: (
        isinstance(type(y), type) and issubclass(type, type) and type(y).mro()[0] is type(x)
    ),
    "__class__": lambda model, x, y: y.__class__ is torch.Tensor,
    "type of a parameter": lambda model, x, y: type(model.linear.weight) is nn.Parameter,
    "type of what is detached": lambda model, x, y: type(model.linear.weight.detach()) is torch.Tensor,
    "parameter": lambda model, x, y: isinstance(model.linear.weight, nn.Parameter),
    "parameters": lambda model, x, y: all(isinstance(one, nn.Parameter) for one in model.parameters()),
    "no parameter": lambda model, x, y: not isinstance(y, nn.Parameter) and not isinstance(model.scale, nn.Parameter),
    "leaf": lambda model, x, y: model.linear.weight.is_leaf and not y.is_leaf,
}


@pytest.mark.parametrize("question", _QUESTIONS)
def test_classes_are_as_in_eager_code(question: str) -> None:
    torch.manual_seed(0)
    model, x = _Asking(_QUESTIONS[question]), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%")
    for _ in range(2):
        for one in (model, eager):
            one.zero_grad()
        loss, expected = model(x), eager(x)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for own, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)  # type: ignore[arg-type]
    assert len(lowtide.plans(model)) == 1
    assert "type" not in globals()
    assert "__getattribute__" not in vars(torch._subclasses.functional_tensor.FunctionalTensor)


class _Keeping(_Asking):
    """Leaves a tensor in an attribute, so that calls in a row tell what that does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(x).detach()
        return super().forward(x)


def test_where_calls_are_rehearsed() -> None:
    torch.manual_seed(0)
    asks = lambda model, x, y: type(y) is torch.Tensor and isinstance(model.linear.weight, nn.Parameter)  # noqa: E731
    model, x = _Keeping(asks), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    for _ in range(2):
        assert torch.equal(model(x), eager(x))
        assert torch.equal(model.last, eager.last)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (2 if type(gradient) is torch.Tensor else 5)


def test_in_a_backward_pass() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    model.forward = lambda x: _Doubled.apply(model[1](model[0](x))).sum()  # type: ignore[method-assign, no-untyped-call]
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    lowtide.rematerialize(model, (x,), budget="100%")
    model(x).backward()
    assert all(torch.equal(one, two.grad) for one, two in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]


_UNKNOWN = {
    "_version": lambda model, x, y: (model.linear.weight._version - model.first[0]) % 2 == 0,
    "_version of a constant": lambda model, x, y: (model.asked_of._version - model.first[1]) % 2 == 0,
    "_base": lambda model, x, y: x._base is None,
    "_is_view": lambda model, x, y: x._is_view(),
    "storage_offset": lambda model, x, y: x.storage_offset() % 16 == 0,
    "untyped_storage": lambda model, x, y: x.untyped_storage().nbytes() > 200,
}


@pytest.mark.parametrize("question", _UNKNOWN)
def test_what_no_plan_knows(question: str) -> None:
    """What weights that are cached by their version ask, say: the model runs in parts."""
    torch.manual_seed(0)
    model, whole = _Asking(_UNKNOWN[question]), torch.randn(8, 8)
    model.asked_of = torch.ones(3)
    eager = copy.deepcopy(model)
    for one in (model, eager):
        one.first = one.linear.weight._version, one.asked_of._version  # type: ignore[assignment, union-attr]
    lowtide.rematerialize(model, (torch.randn(4, 8),), budget="100%")
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, eager)]
    for step in range(4):
        loss, expected = model(whole[step:][:4]), eager(whole[step:][:4])
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for optimizer, one in zip(optimizers, (model, eager), strict=True):
            optimizer.step()
            one.asked_of.add_(1)  # type: ignore[operator, union-attr]


def _written(x: torch.Tensor) -> list[int]:
    """How often tensors were written that a pass makes, as augmentations of ``kornia`` note it."""
    one, other = torch.zeros(3), torch.rand(4).uniform_(0, 1)
    one.add_(1)[0] = 2
    made = [
        one,
        other,
        torch.cat([x, x]).clamp_(0),
        x.relu(),
        torch.empty(2).normal_(),
        torch.triu(x),
        x.mean(0),
        one[1:],
    ]
    return [each._version for each in made]


def test_versions_of_what_the_pass_makes() -> None:
    x = torch.randn(4, 8)
    expected = _written(x)
    model = _Asking(lambda model, x, y: _written(y) == expected)
    eager = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    assert torch.equal(model(x), eager(x))


def test_leaves_that_are_no_parameters() -> None:
    model, x = _Asking(lambda model, x, y: model.scale.is_leaf and model.scale.grad_fn is None), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    assert torch.equal(model(x), eager(x))


def test_what_an_argument_was_computed_by() -> None:
    model, x = _Asking(lambda model, x, y: x.grad_fn is None), torch.randn(4, 8, requires_grad=True)
    with pytest.raises(lowtide.CaptureError, match="is a leaf"):
        lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")


def test_whether_an_argument_is_a_leaf_is_no_question_for_a_plan() -> None:
    model, x = _Asking(lambda model, x, y: x.is_leaf), torch.randn(4, 8, requires_grad=True)
    with pytest.raises(lowtide.CaptureError, match="is a leaf"):
        lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")

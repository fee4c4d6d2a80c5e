"""Attributes and hooks that code puts on tensors: on arguments, parameters, buffers and results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.beside import assert_as_eager

_Called = Callable[[Any, torch.Tensor], None]


class _Doing(nn.Module):
    """Does something to its tensors before it returns."""

    def __init__(self, do: _Called) -> None:
        super().__init__()
        self.first, self.last, self.do = nn.Linear(4, 4), nn.Linear(4, 4), do
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.do(self, x)
        return self.last(torch.tanh(self.first(x))) * self.scale  # type: ignore[no-any-return]


class _Tagged(_Doing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.tag = len(x)  # type: ignore[attr-defined]
        return out


def _nothing(model: Any, x: torch.Tensor) -> None:
    pass


def _marked(model: Any, x: torch.Tensor) -> None:
    x.seen = True  # type: ignore[attr-defined]
    model.first.weight.calls = getattr(model.first.weight, "calls", 0) + 1


def _marked_buffer(model: Any, x: torch.Tensor) -> None:
    model.scale.mean = x.detach().mean()


def _hooked_once(model: Any, x: torch.Tensor) -> None:
    if not model.first.weight._backward_hooks:
        model.first.weight.register_hook(lambda gradient: gradient * 2)


def _hooked(model: Any, x: torch.Tensor) -> None:
    model.last.weight.register_hook(lambda gradient: gradient * 2)


def _hooked_argument(model: Any, x: torch.Tensor) -> None:
    x.register_hook(lambda gradient: gradient * 2)


def _without_gradients(model: Any, x: torch.Tensor) -> None:
    for each in model.parameters():
        each.grad = None


def _deleted_gradient(model: Any, x: torch.Tensor) -> None:
    del x.grad


def _retained(model: Any, x: torch.Tensor) -> None:
    """As maps of what a network looks at are made (Grad-CAM)."""
    model.seen = torch.tanh(model.first(x)) * 2
    model.seen.retain_grad()


class _Seen(_Doing):
    """Goes on with what it did."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.do(self, x)
        return self.last(self.seen)  # type: ignore[no-any-return]


def _step(model: Any, x: torch.Tensor) -> Any:
    out = model(x)
    out.sum().backward()
    marks = [vars(each) for each in (x, out, model.first.weight, model.scale)]
    return out, x.grad, marks


_DOINGS = {
    "attributes": (_marked, "gives attributes"),
    "attribute of a buffer": (_marked_buffer, "gives attributes"),
    "hook": (_hooked_once, "asks a tensor for its _backward_hooks"),
    "a hook in every call": (_hooked, "registers a hook"),
    "hook of an argument": (_hooked_argument, "registers a hook"),
    "gradients": (_without_gradients, "sets .grad"),
    "gradient of an argument": (_deleted_gradient, "sets .grad"),
}


@pytest.mark.parametrize("do, message", _DOINGS.values(), ids=_DOINGS.keys())
def test_what_stays_on_tensors_is_left_to_eager_code(do: _Called, message: str) -> None:
    x = [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
    models = iter(range(8))
    assert_as_eager(lambda: _Doing(do), lambda model, number: _step(model, x[next(models) // 4]))
    with pytest.raises(lowtide.CaptureError, match=message):
        lowtide.rematerialize(_Doing(do), (x[0],), budget="100%", on_capture_error="error")


class _ForCompilers(_Doing):
    """As caches of ``transformers`` mark what they keep, and attention of it what it gets."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        torch._dynamo.maybe_mark_dynamic(x, 0)
        state = torch.tanh(self.first(x)).detach()
        torch._dynamo.mark_static_address(state)
        return super().forward(x), state


def test_marks_for_compilers_are_no_attributes_of_the_programs() -> None:
    x = torch.ones(3, 4)

    def step(model: Any, number: int) -> Any:
        out, state = model(x)
        out.square().sum().backward()
        return out, state, [each.grad for each in model.parameters()]

    assert_as_eager(lambda: _ForCompilers(_nothing), step)
    lowtide.rematerialize(_ForCompilers(_nothing), (x,), budget="100%", on_capture_error="error")


def _marked_once(model: Any, x: torch.Tensor) -> None:
    if not hasattr(model.scale, "_dynamo_static_input_type"):
        torch._dynamo.mark_static_address(model.scale)
        model.first.weight.data.mul_(0.5)


def test_marks_that_code_asks_for() -> None:
    x = torch.ones(3, 4)
    assert_as_eager(lambda: _Doing(_marked_once), lambda model, number: _step(model, x))


def test_gradients_that_a_model_retains_are_there() -> None:
    def step(model: Any, number: int) -> Any:
        out = model(torch.ones(3, 4))
        out.square().sum().backward()
        return out, model.seen.grad

    assert_as_eager(lambda: _Seen(_retained), step)
    with pytest.raises(lowtide.CaptureError, match=r"retain_grad\(\)"):
        lowtide.rematerialize(_Seen(_retained), (torch.ones(3, 4),), budget="100%", on_capture_error="error")


def _adds_gradients(model: Any, x: torch.Tensor) -> None:
    for each in (model.scale, model.last.bias):
        if each.grad is not None:
            model.scale.add_(each.grad)


def test_that_there_is_no_gradient_is_a_condition() -> None:
    """As vector quantization asks of its averages; parameters have one where gradients are accumulated."""

    def step(model: Any, number: int) -> Any:
        if number < 2:
            model.zero_grad()
        if number == 3:
            model.scale.grad = torch.full((4,), 0.5)
        out = model(torch.randn(3, 4))
        out.sum().backward()
        return out

    assert len(lowtide.plans(assert_as_eager(lambda: _Doing(_adds_gradients), step, steps=2))) == 1
    assert_as_eager(lambda: _Doing(_adds_gradients), step, steps=5)


def test_attributes_of_results_are_left_to_eager_code() -> None:
    assert_as_eager(lambda: _Tagged(_nothing), lambda model, number: _step(model, torch.ones(3, 4)))


def _masked(model: Any, x: Any) -> None:
    model.scale = torch.tanh(x.mask) * getattr(x, "factor", 1.0)


def test_tensors_that_belong_to_arguments_are_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """They are others in each step, or changed in place, and may require a gradient."""
    masks = [torch.zeros(4, requires_grad=True), torch.zeros(4)]

    def step(model: Any, number: int) -> Any:
        x: Any = torch.randn(3, 4)
        x.mask = masks[1].fill_(number) if number % 2 else masks[0] + number
        model.zero_grad()
        masks[0].grad = None
        model(x).sum().backward()
        return model.scale, masks[0].grad

    with caplog.at_level(logging.INFO, logger="lowtide"):
        planned = assert_as_eager(lambda: _Doing(_masked), step, steps=8)
    assert len(lowtide.plans(planned)) == 2  # with a gradient of the mask, and without


def test_values_that_belong_to_arguments_make_for_other_programs() -> None:
    def step(model: Any, number: int) -> Any:
        x: Any = torch.randn(3, 4)
        x.mask = torch.arange(4.0)
        if number > 1:
            x.factor = float(number % 2)
        model.zero_grad()
        model(x).sum().backward()
        return model.scale

    assert_as_eager(lambda: _Doing(_masked), step, steps=6)


def _by_weight(model: Any, x: Any) -> None:
    model.scale = model.first.weight.mask * 1.0


def test_tensors_that_belong_to_parameters_that_are_updated_in_the_backward_pass() -> None:
    trained = []
    for planned in (False, True):
        torch.manual_seed(0)
        model: Any = _Doing(_by_weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="keep-all", optimizer=optimizer)
        for number in range(4):
            model.first.weight.mask = torch.full((4,), float(number))
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([each.detach() for each in model.parameters()])
    assert all(map(torch.equal, *trained))

"""Row: tied weights, frozen parameters, unused parameters, integer inputs; ``.grad`` is ``None`` where eager leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import WIDTH, WithLoss, generator, perceptron, rows
from tests.support.training import compare_training, make


def _token_ids(iteration: int) -> Any:
    return (torch.randint(0, 50, (32, 16), generator=generator(iteration)),), {}


class _TiedLanguageModel(nn.Module):
    """Input and output embedding are one parameter; the layers are one module used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = perceptron(2)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for _ in range(3):
            x = x + self.layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 50), ids[:, 1:].reshape(-1))


def test_tied_weights_and_integer_inputs() -> None:
    compare_training(_TiedLanguageModel, _token_ids, budgets=("100%", "70%", "45%"))


def _frozen() -> nn.Module:
    body = perceptron(6)
    for parameter in body[4:8].parameters():
        parameter.requires_grad_(False)
    body[0].bias.requires_grad_(False)
    return WithLoss(body)


def test_frozen_parameters() -> None:
    compare_training(_frozen, rows())


def test_frozen_model_with_differentiable_input() -> None:
    compare_training(lambda: _frozen().requires_grad_(False), rows(requires_grad=True))


def test_differentiable_input() -> None:
    compare_training(lambda: WithLoss(perceptron()), rows(requires_grad=True))


class _Unused(nn.Module):
    """A module that is never called, a parameter that does not reach the result, one that is multiplied by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)
        self.never = nn.Linear(32, 32)
        self.lost = nn.Parameter(torch.ones(32))
        self.zeroed = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ = x * self.lost
        return self.body(x) + 0 * self.zeroed


def test_unused_parameters() -> None:
    outcome, *_ = compare_training(lambda: WithLoss(_Unused()), rows())
    gradients = outcome.records[0].gradients
    assert gradients["body.never.weight"] is None
    assert gradients["body.lost"] is None
    assert gradients["body.zeroed"] is not None


class _LossDependent(nn.Module):
    """Two heads; which of them gets a gradient is the caller's business."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)
        self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return self.first(x), self.second(x)


def test_gradient_for_one_of_two_outputs() -> None:
    compare_training(_LossDependent, rows(), lambda output: output[0].square().sum())


def test_gradients_for_other_outputs_in_turn() -> None:
    calls = {"count": 0}

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        first, second = model(*args)
        calls["count"] += 1
        chosen = (first.sum(), second.sum(), first.sum() + second.sum())[(calls["count"] - 1) % 3]
        chosen.backward()
        return first, second

    compare_training(_LossDependent, rows(), step=step, check_peak=False, layouts=True)


def test_transposed_and_scalar_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32).t())
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.body = perceptron(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x @ self.weight) * self.scale.exp()

    compare_training(lambda: WithLoss(Odd()), rows())


def test_float64_and_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = perceptron(3).double(), perceptron(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.narrow(x).double()).square().mean()

    compare_training(Mixed, rows())


class _Staying(nn.Module):
    """Moves its layer in each call to where it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = perceptron(4), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.to(x.device, self.dtype)(x.to(self.dtype)).square().mean()


def test_a_module_that_is_moved_to_where_it_is() -> None:
    compare_training(lambda: _Staying(torch.float32), rows(), budgets=("45%",), on_capture_error="error")


def test_a_module_that_is_moved_elsewhere() -> None:
    model = _Staying(torch.float64)
    with pytest.raises(lowtide.CaptureError):
        lowtide.rematerialize(model, rows()(0)[0], budget="100%", on_capture_error="error")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class _TrainedBuffer(nn.Module):
    """Its forward pass has a buffer require a gradient, and a parameter none: ``early``, before it reads them."""

    def __init__(self, early: bool = True) -> None:
        super().__init__()
        self.early = early
        self.layer, self.teacher = perceptron(2), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.early else x * self.scale
        x = self.layer(x) * self.scale.requires_grad_()
        x = x + self.scale.requires_grad_()
        self.teacher.weight.requires_grad = False
        return (x - self.teacher(x)).square().mean()


class _BesideItems(_TrainedBuffer):
    """What it reads is none of a graph, so it runs in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _TrainedBuffer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.inner(x)
        return loss + self.inner(x) if loss > -1 else loss


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("kind", [_TrainedBuffer, _BesideItems])
def test_what_the_first_call_has_require_a_gradient(kind: Callable[[], nn.Module], prepared: bool) -> None:
    """From that call on, not from when it is planned for."""
    plain, model = (make(kind) for _ in range(2))
    wanted = [tensor.requires_grad for tensor in (*plain.parameters(), *plain.buffers())]
    x = rows()(0)[0][0]
    lowtide.rematerialize(model, *[(x,)] * prepared, budget="100%")
    assert [tensor.requires_grad for tensor in (*model.parameters(), *model.buffers())] == wanted
    for _ in range(3):
        for one in (plain, model):
            one(x).backward()
        for theirs, ours in zip(
            (*plain.parameters(), *plain.buffers()), (*model.parameters(), *model.buffers()), strict=True
        ):
            assert theirs.requires_grad == ours.requires_grad
            assert (theirs.grad is None) == (ours.grad is None)
            assert theirs.grad is None or torch.equal(theirs.grad, ours.grad)
    (plan, *_) = lowtide.plans(model)
    assert plan.peak_bytes > 0


def test_a_buffer_that_is_read_before_it_requires_a_gradient() -> None:
    model = make(lambda: _TrainedBuffer(early=False))
    x = rows()(0)[0][0]
    with pytest.raises(lowtide.CaptureError, match="read before"):
        lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    assert not model.scale.requires_grad
    model(x)
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    model(x).backward()
    assert model.scale.grad is not None

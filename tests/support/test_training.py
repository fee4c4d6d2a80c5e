"""The comparison itself: eager equals eager, and every kind of wrong rematerialization is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.networks import perceptron, rows
from tests.support.training import compare_training


def _model() -> nn.Module:
    return nn.Sequential(perceptron(2), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))


def _identity(model: nn.Module, args: Any, kwargs: Any, *, budget: Any) -> nn.Module:
    return model


def _compare(prepare: Any) -> None:
    compare_training(_model, rows(), prepare=prepare)


def test_eager_equals_eager() -> None:
    _compare(_identity)


def _replace_forward(change: Any) -> Any:
    def prepare(model: nn.Module, args: Any, kwargs: Any, *, budget: Any) -> nn.Module:
        forward = model.forward
        model.forward = lambda *a: change(model, forward, *a)
        return model

    return prepare


def _extra_forward(model: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    forward(x)
    torch.set_rng_state(state)
    return forward(x)


def _extra_random_number(model: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    result = forward(x)
    torch.rand(1)
    return result


def _other_layout(model: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    return forward(x).t().contiguous().t()


def _detached_half(model: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
    result = forward(x)
    return torch.cat([result[:1].detach(), result[1:]])


def _wrapped(model: nn.Module, forward: Any, x: torch.Tensor) -> Any:
    return [forward(x)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_extra_forward, "running_mean|num_batches_tracked"),
        (_extra_random_number, "generator state"),
        (_other_layout, "output layouts"),
        (_detached_half, "gradient of"),
        (_wrapped, "output structure"),
    ],
)
def test_wrong_results_are_caught(change: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _compare(_replace_forward(change))


def test_missing_gradient_is_caught() -> None:
    def prepare(model: nn.Module, args: Any, kwargs: Any, *, budget: Any) -> nn.Module:
        model[0][0].weight.requires_grad_(False)
        return model

    with pytest.raises(AssertionError, match=r"gradient of 0\.0\.weight: None instead of a tensor"):
        _compare(prepare)


def test_touched_buffers_are_caught() -> None:
    def prepare(model: nn.Module, args: Any, kwargs: Any, *, budget: Any) -> nn.Module:
        model(*args, **kwargs)
        return model

    with pytest.raises(AssertionError, match="preparation moved the generator"):
        _compare(prepare)

"""What a backward pass computes stays while what the forward pass computed can go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.dynamic import context
from lowtide.dynamic.node import Origin, storage_of
from lowtide.dynamic.storages import is_empty
from tests.online.programs_support import collect

ROWS, WIDTH, LAYERS = 1024, 64, 32


def _network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("share", [50, 30, 20])
def test_gradients_stay(share: int) -> None:
    """Those of a step, and those that a second one is added to."""
    model, inputs = _network()

    def step() -> None:
        model(inputs).square().mean().backward()

    peak_bytes = lowtide.measure(step).peak_bytes
    step()  # adds to the gradients of the one that was measured
    expected = [gradient.clone() for gradient in _gradients(model)]
    model.zero_grad()
    collect()
    with lowtide.online(peak_bytes * share // 100) as session:
        for _ in range(2):
            step()
            gradients = _gradients(model)
            assert len(gradients) == len(expected)
            assert not any(is_empty(storage_of(gradient)) for gradient in gradients)
    assert session.statistics.evictions > 0
    assert session.statistics.rematerializations < 1.5 * session.statistics.operators
    assert all(map(torch.equal, _gradients(model), expected))


def _origin(tensor: torch.Tensor) -> Origin:
    assert context._run is not None
    return context._run.memory.node_of(tensor).origin


def _leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 1000, requires_grad=True)


def _delivered(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _stolen() -> Origin:
    leaf = _leaf()
    leaf.exp().sum().backward()
    return _origin(_delivered(leaf))


def _added_to() -> Origin:
    leaf = _leaf()
    leaf.exp().sum().backward()
    leaf.exp().sum().backward()
    return _origin(_delivered(leaf))


def _copied() -> Origin:
    leaf = _leaf()
    torch.autograd.backward(leaf * 2, torch.ones(1000).expand(1000))
    return _origin(_delivered(leaf))


def _differentiated() -> Origin:
    leaf = _leaf()
    with pytest.warns(UserWarning, match="reference cycle"):
        leaf.exp().sum().backward(create_graph=True)
    origin = _origin(_delivered(leaf))
    leaf.grad = None
    return origin


def _through_a_hook(*, create_graph: bool) -> Origin:
    leaf, seen = _leaf(), list[Origin]()
    hidden = leaf.exp()
    hidden.register_hook(lambda gradient: seen.append(_origin(gradient)))
    torch.autograd.grad(hidden.square().sum(), leaf, create_graph=create_graph)
    return seen[0]


def _computed_forward() -> Origin:
    return _origin(_leaf().exp())


def _checkpointed() -> Origin:
    seen = list[Origin]()

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = x.exp()
        seen.append(_origin(hidden))
        return hidden.square()

    checkpoint(function, _leaf(), use_reentrant=False).sum().backward()
    assert len(seen) == 2
    return seen[1]


@pytest.mark.parametrize(
    ("find", "expected"),
    [
        (_stolen, Origin.GRADIENT),
        (_added_to, Origin.GRADIENT),
        (_copied, Origin.GRADIENT),
        (_differentiated, Origin.GRADIENT),
        (lambda: _through_a_hook(create_graph=False), Origin.BACKWARD),
        (lambda: _through_a_hook(create_graph=True), Origin.FORWARD),
        (_computed_forward, Origin.FORWARD),
        (_checkpointed, Origin.FORWARD),
    ],
)
def test_origins(find: Callable[[], Origin], expected: Origin) -> None:
    with lowtide.online("1GiB"):
        assert find() is expected

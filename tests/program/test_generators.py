"""Random operators draw the same once more from a generator of their own, and nobody else notices or is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.signature import target_name
from lowtide.ir import RestoreRng
from lowtide.program import targets
from lowtide.program.generators import Draw, form_with_generator
from tests.support.networks import WithLoss

_ATEN = torch.ops.aten
_X = torch.linspace(0.1, 0.9, 35).reshape(5, 7)
_LAYOUT = ((5, 7), (1, 5), torch.float32, torch.device("cpu"))
_SIZED = {"dtype": torch.float32, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
_CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (targets.bernoulli, (_LAYOUT, 0.3), {}),
    (_ATEN.bernoulli.default, (_X,), {}),
    (_ATEN.bernoulli.p, (_X, 0.3), {}),
    (_ATEN.bernoulli_.float, (torch.empty(5, 7), 0.3), {}),
    (_ATEN.bernoulli.out, (_X,), {"out": torch.empty(5, 7)}),
    (_ATEN.rand.default, ([5, 7],), _SIZED),
    (_ATEN.randn.default, ([5, 7],), _SIZED),
    (_ATEN.rand_like.default, (_X,), {}),
    (_ATEN.randn_like.default, (_X.double(),), {}),
    (_ATEN.randint_like.default, (_X, 9), {}),
    (_ATEN.randint_like.low_dtype, (_X, 3, 9), {}),
    (_ATEN.randint.low, (2, 9, [5, 7]), {}),
    (_ATEN.randperm.default, (40,), {}),
    (_ATEN.multinomial.default, (_X, 3, True), {}),
    (_ATEN.uniform.default, (_X, -1.0, 1.0), {}),
    (_ATEN.normal_functional.default, (_X, 0.0, 2.0), {}),
    (_ATEN.exponential.default, (_X, 1.5), {}),
    (_ATEN.poisson.default, (_X * 9,), {}),
    (_ATEN.rrelu_with_noise_functional.default, (_X - 0.5, torch.empty(5, 7), 0.1, 0.3, True), {}),
]


@pytest.mark.parametrize("call", _CALLS, ids=lambda call: target_name(call[0]))
def test_the_same_is_drawn_again(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
    target, args, kwargs = call
    draw = Draw(torch.default_generator)
    first = torch.utils._pytree.tree_map(torch.clone, target(*args, **kwargs))
    draw.drawn()
    torch.manual_seed(12345)
    stands = torch.get_rng_state()
    form = form_with_generator(target, len(args))
    assert form is not None
    with draw.again() as generator:
        again = form(*args, **kwargs, generator=generator)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), stands)


def test_operators_without_a_generator_have_no_form() -> None:
    assert form_with_generator(_ATEN.native_dropout.default, 3) is None
    assert form_with_generator(_ATEN.rrelu_with_noise_functional.default, 6) is None  # it was given one, by position
    assert form_with_generator(torch.relu, 1) is None


@pytest.mark.parametrize("meddle", [lambda: torch.rand(1), lambda: torch.manual_seed(3)], ids=["draws", "seeds"])
def test_a_draw_in_between_is_heard(meddle: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    draw = Draw(torch.default_generator)
    meddle()
    torch.rand(4)
    draw.drawn()
    with pytest.raises(lowtide.ExecutionError, match="another thread"), draw.again() as generator:
        torch.rand(4, generator=generator)


@contextmanager
def _another_thread_draws() -> Iterator[None]:
    """Another thread seeds the generator and draws from it; on leaving, it has drawn what its seed says every time."""
    ended, begun, wrong = threading.Event(), threading.Event(), list[torch.Tensor]()
    expected = torch.rand(1 << 14, generator=torch.Generator().manual_seed(7))

    def draw() -> None:
        while not ended.is_set():
            torch.manual_seed(7)
            drawn = torch.rand(1 << 14)
            if not torch.equal(drawn, expected):
                wrong.append(drawn)
            begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not wrong


def _network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.4)) for _ in range(6)]
    return WithLoss(nn.Sequential(*layers))


def _gradients(model: nn.Module, x: torch.Tensor, seed: int, disturbed: bool) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(x)
    if disturbed:
        with _another_thread_draws():
            loss.backward()
    else:
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_another_thread_may_draw_and_seed_during_a_backward_pass() -> None:
    x, plain, model = torch.randn(256, 32), _network(), _network()
    lowtide.rematerialize(model, (x,), budget="90%", planner="chen-sqrt")
    (plan,) = lowtide.plans(model)
    assert any(isinstance(step, RestoreRng) for step in plan.schedule.steps)
    for seed in range(20):
        expected = _gradients(plain, x, seed, disturbed=False)
        found = _gradients(model, x, seed, disturbed=True)
        assert all(map(torch.equal, found, expected))


def test_the_same_under_the_online_mode() -> None:
    x, plain, model = torch.randn(256, 32), _network(), _network()
    expected = _gradients(plain, x, 0, disturbed=False)
    for nested in (False, True) * 5:
        around = lowtide.online(budget=400_000) if nested else nullcontext()
        with around, lowtide.online(budget=300_000) as session:
            found = _gradients(model, x, 0, disturbed=True)
        assert session.statistics.rematerializations > 0
        assert all(map(torch.equal, found, expected))

"""What is used several times gets its gradients one after the other, in eager's order, wherever the uses lie: in several calls
of a model that wait for one backward pass, or in a planned module and around it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from tests.support.wide import pairs

WIDTH = 32


def _body(inner: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, WIDTH))


class _Tied(nn.Module):
    """The table is read at both ends, the body twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.body = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH), _body()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for _ in range(2):
            x = x + self.body(self.norm(x))
        return x @ self.table.weight.t()


class _TiedLoss(_Tied):
    """Returns its own loss."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).log_softmax(-1).square().mean()


class _Repeated(nn.Module):
    """One layer, five times, and an output with several views."""

    def __init__(self, inner: int = 64) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(50, WIDTH), _body(inner)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.table(ids)
        for _ in range(5):
            x = torch.tanh(x + self.body(x))
        return x.chunk(2, dim=-1)


def _ids(seed: int, rows: int = 16) -> torch.Tensor:
    return torch.randint(0, 50, (rows, 12), generator=torch.Generator().manual_seed(seed))


def _agreeing(model: nn.Module, *batches: torch.Tensor) -> torch.Tensor:
    """A loss of all calls."""
    total: Any = 0
    before = None
    for ids in batches:
        result = model(ids)
        result = result if isinstance(result, torch.Tensor) else torch.cat(result, -1)
        score = result.log_softmax(-1)
        total = total + score.square().mean() + (0 if before is None else (score.mean(0) * before.mean(0).exp()).mean())
        before = score
    return torch.as_tensor(total)


def _equal_steps(
    plain: nn.Module, model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], steps: int = 3
) -> None:
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-5) for one in (plain, model)]
    for seed in range(steps):
        found = []
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            value = loss(one, seed)
            value.backward()
            found.append([value.detach(), *(parameter.grad.clone() for parameter in one.parameters())])
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), seed


@pytest.mark.parametrize(
    ("of", "sizes"),
    pairs([(_Tied, "85%"), (_Tied, "100%"), (_Repeated, "100%"), (_Repeated, "85%")], [(16, 16), (16, 8, 16)]),
)
def test_calls_that_wait_together(of: tuple[Callable[[], nn.Module], str], sizes: tuple[int, ...]) -> None:
    """From the first step on: the first call is known to be one of several only when the second one begins."""
    make, budget = of
    torch.manual_seed(0)
    plain = make()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget=budget, planner="greedy")

    def loss(one: nn.Module, seed: int) -> torch.Tensor:
        return _agreeing(one, *(_ids(10 * seed + number, rows) for number, rows in enumerate(sizes)))

    _equal_steps(plain, model, loss)


@pytest.mark.parametrize("budget", ["85%", "100%"])
def test_losses_that_wait_together(budget: str) -> None:
    """The backward pass of the second call ends before that of the first one begins."""
    torch.manual_seed(0)
    plain = _TiedLoss()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget=budget, planner="greedy")
    _equal_steps(plain, model, lambda one, seed: one(_ids(2 * seed)) + one(_ids(2 * seed + 1, 8)))


def test_calls_at_new_sizes() -> None:
    """Members of a family hand over terms as well."""
    torch.manual_seed(0)
    plain = _Tied()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="85%", planner="greedy", dynamic=True)
    _equal_steps(plain, model, lambda one, seed: _agreeing(one, _ids(seed, 4 + seed), _ids(9, 9 + 2 * seed)), steps=5)


def test_calls_by_turns_and_together() -> None:
    """A backward pass for each call, also in another order, and later one for both."""
    torch.manual_seed(0)
    plain = _Tied()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="85%", planner="greedy")

    def loss(one: nn.Module, seed: int) -> torch.Tensor:
        first, second = (one(_ids(number)).square().mean() for number in (seed, 7))
        if seed % 2:
            return first + second
        first.backward()
        return second

    _equal_steps(plain, model, loss, steps=4)


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, False, True)])
def test_calls_in_evaluation_mode_beside(order: tuple[bool, ...]) -> None:
    """They run as they are, and their gradients are added in between, as where a teacher is the student in another mode."""
    torch.manual_seed(0)
    plain = _Tied()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="85%", planner="greedy")

    def loss(one: nn.Module, seed: int) -> torch.Tensor:
        total: Any = 0
        for number, training in enumerate(order):
            one.train(training)
            total = total + one(_ids(10 * seed + number)).log_softmax(-1).square().mean()
        return torch.as_tensor(total)

    _equal_steps(plain, model, loss)


class _Scaled(_Tied):
    """Every call computes with what the one before has left in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.scale
        x = x + self.body(self.norm(x))
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x @ self.table.weight.t()


def test_calls_that_change_what_the_next_one_reads() -> None:
    torch.manual_seed(0)
    plain = _Scaled()
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="90%", planner="greedy")
    ids = _ids(0), _ids(1)
    for seed in range(3):
        found = []
        for one in (plain, model):
            torch.manual_seed(seed)
            one.zero_grad()
            value = _agreeing(one, *ids)
            value.backward()
            found.append([value.detach(), *(parameter.grad.clone() for parameter in one.parameters())])
        assert torch.equal(plain.scale, model.scale)
        assert all(torch.allclose(*pair) if seed == 0 else torch.equal(*pair) for pair in zip(*found, strict=True))


def test_terms_that_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Calls hand over sums then, as the log says, and train on."""
    torch.manual_seed(0)
    plain, ids = _Repeated(1024), _ids(0, 1)
    (plan,) = lowtide.plans(lowtide.rematerialize(copy.deepcopy(plain), (ids,), budget="100%", planner="keep-all"))
    model = lowtide.rematerialize(copy.deepcopy(plain), budget=plan.peak_bytes, planner="greedy")
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        for _ in range(2):
            for one in (plain, model):
                torch.manual_seed(0)
                one.zero_grad()
                _agreeing(one, ids, ids).backward()
    assert caplog.text.count("hand over sums of gradients") == 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        result: torch.Tensor = self.out(attended)
        return result


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.start = _Attending(), _Attending(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        x = x + self.first(x)
        return (self.second(x) + self.first(x) + x.sin()).square().mean()


@pytest.mark.parametrize("rows", [(8,), (8, 5, 9, 6)])
def test_a_module_and_what_is_around_it(rows: tuple[int, ...]) -> None:
    """An argument that was computed gets gradients from inside and from outside."""
    torch.manual_seed(0)
    plain = _Around()
    model = copy.deepcopy(plain)
    for one in (model.first, model.second):
        lowtide.rematerialize(one, budget="100%", planner="greedy")

    def loss(one: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(rows[seed % len(rows)], 6, WIDTH, generator=torch.Generator().manual_seed(seed))
        value: torch.Tensor = one(x)
        return value

    _equal_steps(plain, model, loss, steps=5)


def test_an_argument_that_is_a_leaf() -> None:
    torch.manual_seed(0)
    plain, x = _Attending(), torch.randn(4, 6, WIDTH)
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="100%", planner="greedy")
    found = []
    for one in (plain, model):
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            (one(leaf).square().mean() + leaf.sin().mean()).backward()
        (alone,) = torch.autograd.grad(one(leaf).sum(), [leaf])
        found.append((leaf.grad, alone))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class _Pair(nn.Module):
    """Results that use what is read a different number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(WIDTH, WIDTH), _body()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.tanh(self.layer(x))
        second = self.body(torch.sin(self.layer(torch.cos(self.layer(x)))) * x.sigmoid()) + self.layer(x.exp())
        return first, second


class _Upstream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.pair = nn.Linear(WIDTH, WIDTH), _Pair()


@pytest.mark.parametrize(("order", "calls"), pairs([(0, 2, 1, 2, 0), (2, 1, 0, 1, 2), (1, 0, 2, 0)], [2, 1]))
def test_gradients_of_other_results_than_before(order: tuple[int, ...], calls: int) -> None:
    """A program for other gradients has more terms than the one that ran forward, or fewer."""
    torch.manual_seed(0)
    plain = _Upstream()
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model.pair, budget="100%", planner="greedy")

    def loss(one: Any, seed: int) -> torch.Tensor:
        total = torch.zeros(())
        for number in range(calls):
            x = one.start(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed + number)))
            results = one.pair(x)
            total = total + x.sin().mean()
            for index, result in enumerate(results):
                if order[seed] in (index, 2):
                    total = total + result.square().mean()
        return total

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (plain, model)]
    for seed in range(len(order)):
        found = []
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss(one, seed).backward()
            found.append([parameter.grad for parameter in one.parameters()])
            optimizer.step()
        pairs = list(zip(*found, strict=True))
        assert all((ours is None) == (theirs is None) for ours, theirs in pairs)
        assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in pairs if pair[0] is not None)
        assert seed == 0 or all(torch.equal(*pair) for pair in pairs if pair[0] is not None), seed

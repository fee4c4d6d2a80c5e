"""Row: dropout > 0, several iterations: eager's masks, a fresh mask each time, eager's generator state afterwards."""

from __future__ import annotations

import copy
import logging
import random
from random import randrange, uniform
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import nn

import lowtide
from lowtide.api import runtime_of
from tests.support.beside import assert_as_eager
from tests.support.networks import Residual, WithLoss, perceptron, residual_blocks, rows
from tests.support.training import compare_training, prepared


def _dropout_network() -> nn.Module:
    body = residual_blocks(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)))
    return WithLoss(nn.Sequential(body, nn.Dropout(0.1), nn.Linear(32, 8)))


def test_dropout() -> None:
    compare_training(_dropout_network, rows(), budgets=("100%", "70%", "45%"))


def test_masks_are_fresh() -> None:
    """The same input gives another loss at every iteration, as in eager."""

    def same_input(iteration: int) -> Any:
        return rows()(0)

    model = prepared(_dropout_network, same_input, "45%")
    losses = {model(*same_input(0)[0]).item() for _ in range(4)}
    assert len(losses) == 4


class _OtherNoise(nn.Module):
    """Random operators beside dropout, one of whose results nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        noise = torch.randn_like(x)
        x = self.body(x + 0.1 * noise)
        keep = torch.bernoulli(torch.full_like(x, 0.8))
        x = self.body(x * keep) * torch.rand(x.shape[0], 1)
        order = torch.randperm(x.shape[0])
        return x[order] + torch.empty_like(x).uniform_(-0.1, 0.1)


def test_other_random_operators() -> None:
    compare_training(lambda: WithLoss(_OtherNoise()), rows(), budgets=("70%", "50%", "45%"))


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3), nn.RReLU()],
    ids=lambda layer: type(layer).__name__,
)
def test_other_dropouts(layer: nn.Module) -> None:
    def network() -> nn.Module:
        return WithLoss(nn.Sequential(perceptron(2), layer, Residual(perceptron(2)), layer, nn.Linear(32, 4)))

    compare_training(network, rows(), budgets=("60%",))


def test_attention_dropout() -> None:
    def network() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        return WithLoss(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    def inputs(iteration: int) -> Any:
        return (torch.randn(16, 16, 32, generator=torch.Generator().manual_seed(iteration)),), {}

    compare_training(network, inputs)


class _MayDraw(nn.Module):
    """Names functions of the generators that all share, and calls none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.augments = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.augments:
            x = x + rand() + uniform(0, 1) + np.random.rand() + random.random()
        return self.layer(x).tanh().sum()


def test_draws_between_the_steps_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A loader draws, too."""
    caplog.set_level(logging.INFO, "lowtide")
    model = _MayDraw()
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    for _ in range(4):
        np.random.rand(), random.random()
        model(torch.randn(4, 8)).backward()
    assert "captured again" not in caplog.text


class _Recycled(nn.Module):
    """Runs a block as often as a generator says, whose functions were imported by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.how = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = randrange(3) + np.random.randint(0, 2) if self.how == "integers" else 1 + (uniform(0, 1) < 0.5)
        for _ in range(times):
            x = x + self.block(x)
        return (x + self.block(x)).square().sum()


@pytest.mark.parametrize(("how", "most"), [("integers", 6), ("compared", 2)])
def test_what_is_drawn_again_is_known(how: str, most: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    torch.manual_seed(0)
    plain = _Recycled(how)
    model = lowtide.rematerialize(copy.deepcopy(plain), budget="100%", planner="greedy")
    for number in range(24):
        found = []
        for each in (plain, model):
            each.zero_grad()
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(number)
            loss = each(torch.randn(4, 8))
            loss.backward()
            found.append(
                [loss, *(p.grad for p in each.parameters()), torch.tensor([random.random(), np.random.rand()])]
            )
        assert all(map(torch.equal, *found))
    assert caplog.text.count("captured again") < most
    assert randrange is random.randrange and uniform is random.uniform  # type: ignore[comparison-overlap]


class _Dropping(nn.Module):
    """Layers inside of one submodule of which Python's generator says which run, and a decision by data around it."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.ModuleDict({"inner": _Layers()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.core["inner"](x).square().sum()
        return loss * 2 if loss < 0 else loss


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) if uniform(0, 1) < 0.6 else x
        return x


def test_layers_that_are_drawn_are_parts_by_themselves() -> None:
    torch.manual_seed(0)
    model = lowtide.rematerialize(_Dropping(), budget="100%", planner="greedy")
    random.seed(0)
    for _ in range(4):
        model(torch.randn(16, 32)).backward()
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.parts is not None
    assert {part.name.rpartition(".")[0] for part in runtime.parts.planned()} == {"core.inner.layers"}


def _with_a_shuffle(x: torch.Tensor) -> torch.Tensor:
    order = [1, 2, 3]
    random.shuffle(order)
    return x * order[0] * random.uniform(0.5, 2)


def _with_another_that_is_returned(x: torch.Tensor) -> Any:
    return x[random.randint(0, 7) :][:2] * random.uniform(0.5, 2), random.uniform(0.5, 2)


def _read_in_vain(x: torch.Tensor) -> torch.Tensor:
    torch.randint(0, 30, ()).item()
    return x * torch.rand_like(x)


def _by_a_seed(x: torch.Tensor) -> torch.Tensor:
    return x * np.random.default_rng(3).random() * random.random()


@pytest.mark.parametrize("compute", [_with_a_shuffle, _with_another_that_is_returned, _read_in_vain, _by_a_seed])
def test_draws_of_which_only_some_are_followed(compute: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return compute(self.layer(x))

    def step(model: Any, number: int) -> Any:
        random.seed(number)
        returned = model(torch.randn(8, 8))
        (returned[0] if isinstance(returned, tuple) else returned).sum().backward()
        return returned, random.random()

    assert_as_eager(Model, step)

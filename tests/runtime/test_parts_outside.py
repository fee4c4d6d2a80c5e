"""What models of other packages do that are no single program: in parts, equal to eager to the bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.cost import synthetic

WIDTH = 32


def _equal_steps(model: nn.Module, x: torch.Tensor, steps: int = 3, **settings: Any) -> nn.Module:
    """The planned model, after steps with SGD in which loss, gradients, buffers and the generator were equal to eager's."""
    plain, model = model, copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), **{"budget": "90%", **settings})
    for seed in range(steps):
        results = []
        for one in (plain, model):
            torch.manual_seed(seed)
            one.zero_grad()
            loss = one(x)
            loss.backward()
            gradients = [parameter.grad for parameter in one.parameters()]
            results.append([loss.detach(), torch.get_rng_state(), *gradients, *(b.clone() for b in one.buffers())])
            torch.optim.SGD(one.parameters(), 0.01).step()
        for expected, found in zip(*results, strict=True):
            assert (expected is None) == (found is None) and (expected is None or torch.equal(expected, found))
    return model


class _Hooked(nn.Module):
    """A hook inside of it is a method of its own, and a second result has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh()), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.net[0].register_forward_hook(self._scaled)

    def _scaled(self, _: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return self.scale * result

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.net(x)
        return self.head(hidden), hidden


class _Deciding(nn.Module):
    """Decides by random numbers how often its block runs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand(()).item() < 0.9:
            x = self.block(x)[0]
        return x.square().mean()


def test_a_part_that_a_hook_inside_of_it_leads_to() -> None:
    model = _equal_steps(_Deciding(_Hooked()), torch.randn(16, WIDTH))
    assert [part.name for part in model.forward.parts.planned()] == ["block"]


def test_what_planning_keeps_is_no_memory_between_parts() -> None:
    """A pattern of some hundred kilobytes, to measure with, in a step that takes some ten."""
    synthetic._pattern.cache_clear()
    block = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH), nn.Unflatten(0, (1, -1)))
    model = _equal_steps(_Deciding(block), torch.randn(17, WIDTH), budget="100%")
    assert model.forward.parts.shared.record.most_between < synthetic._pattern(torch.float32).nbytes / 2

"""Row: in-place operators on views of views, of any depth and kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from tests.support.networks import generator
from tests.support.training import MINIMUM, compare_training
from tests.support.wide import seeds

SIDE = 8
_SCATTERS = ("slice_scatter", "select_scatter", "as_strided_scatter")
View = Callable[[torch.Tensor], torch.Tensor]


def _one_view(chosen: random.Random, shape: tuple[int, ...]) -> View | None:
    """A random view of a tensor of this shape, ``None`` where it has too few elements."""
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    if not wide:
        return None
    dim = chosen.choice(wide)
    size = shape[dim]
    kind = chosen.randrange(6)
    if kind == 0 and len(wide) > 1:
        index = chosen.randrange(size)
        return lambda x: x.select(dim, index)
    if kind == 1:
        start, step = chosen.randrange(size - 1), chosen.choice((1, 2))
        return lambda x: x[(slice(None),) * dim + (slice(start, None, step),)]
    if kind == 2 and size % 2 == 0:
        return lambda x: x.unflatten(dim, (size // 2, 2))
    if kind == 3:
        other = chosen.choice(wide)
        return lambda x: x.transpose(dim, other)
    if kind == 4:
        return lambda x: x.unsqueeze(dim)
    return lambda x: x[(slice(None),) * dim + (slice(None),)]


class Writes(nn.Module):
    """Writes in place into views of views, in an order drawn from a seed, and reads between the writes."""

    def __init__(self, seed: int, writes: int = 6) -> None:
        super().__init__()
        chosen = random.Random(seed)
        self.layer = nn.Linear(SIDE, SIDE)
        self.paths = []
        for _ in range(writes):
            seen, path = torch.empty(SIDE, SIDE, SIDE), []
            for _ in range(chosen.randrange(1, 5)):
                view = _one_view(chosen, tuple(seen.shape))
                if view is not None:
                    path.append(view)
                    seen = view(seen)
            self.paths.append((path, chosen.randrange(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh() * 2
        total = y.sum()
        for path, kind in self.paths:
            seen = y
            for view in path:
                seen = view(seen)
            if kind == 0:
                seen.mul_(0.5)
            elif kind == 1:
                seen.add_(seen.flip(0))
            elif kind == 2:
                seen.copy_(seen.flatten().flip(0).reshape(seen.shape).cos())
            else:
                total = total + seen.clone().square().sum()
                seen.sub_(1.0)
        return total + y.square().mean()


def _cubes(*shape: int) -> Callable[[int], Any]:
    def make_inputs(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(shape, generator=generator(iteration)).requires_grad_(),), {}

    return make_inputs


@pytest.mark.parametrize("seed", seeds(3, 300))
def test_writes_into_views_of_views(seed: int) -> None:
    compare_training(lambda: Writes(seed), _cubes(SIDE, SIDE, SIDE), budgets=("85%", MINIMUM))


class Deep(nn.Module):
    """As a scan over pairs writes: each level into every other row of the one before, seen as pairs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        seen = x.transpose(1, 2)
        for _ in range(3):
            seen = seen.view(seen.shape[0], -1, 2, *seen.shape[2:])
            seen[:, :, 1].add_(seen[:, :, 0])
            seen = seen[:, :, 1]
        return x.square().sum()


def test_each_write_is_one_operator() -> None:
    program = capture(Deep(), (torch.randn(2, 4, 8).requires_grad_(),)).program
    forward = program.graph.ops[: program.graph.forward_ops]
    writes = [op for op in forward if any(name in op.target for name in _SCATTERS)]
    assert len(writes) == 3
    assert all(op.overwrites for op in writes[1:])
    shapes = [program.metas[op.inputs[1]].shape for op in writes]
    assert shapes == [(2, 4, 4), (2, 2, 4), (2, 1, 4)]
    compare_training(Deep, _cubes(2, 4, 8), budgets=(MINIMUM,))


def test_at_other_lengths() -> None:
    """A family of shapes holds the program that a capture at each length gives."""

    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIDE, SIDE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).tanh() * 2
            y[:, 1][:, 2:].mul_(0.5)
            y[1:][:, :, 0][:, 0].add_(1.0)
            return y.square().sum()

    torch.manual_seed(0)
    model = Lengths()
    lowtide.rematerialize(model, budget="90%", planner="greedy", dynamic=True)
    for length in (5, 7, 9, 6, 11):
        x = torch.randn(length, 4, SIDE)
        model.zero_grad()
        model(x).backward()
        found = model.layer.weight.grad.clone()
        model.zero_grad()
        Lengths.forward(model, x).backward()
        assert torch.equal(found, model.layer.weight.grad)


class Elsewhere(nn.Module):
    """Puts a changed copy of one part into another one, which is no write into a view of a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        changed = torch.select_scatter(y[1], y[2][0] * 3, 0, 0)
        moved = torch.select_scatter(y, changed, 0, 0)
        turned = torch.slice_scatter(moved[2:4], moved[:1] * 5, 0, 0, 1).flip(0).transpose(0, 0)
        across = torch.select_scatter(moved.transpose(0, 1)[1], x[0, 0], 0, 3)
        moved = torch.select_scatter(moved, across, 0, 1)
        return torch.slice_scatter(moved, turned, 0, 2, 4).square().sum()


def test_parts_that_go_elsewhere() -> None:
    compare_training(Elsewhere, _cubes(4, 4, 4), budgets=("75%", MINIMUM), quick=0)

"""What later steps of a model in parts bring: larger arguments, layers that are frozen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

import lowtide

WIDTH = 64


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Decided(nn.Module):
    """Its blocks follow each other where the data decide so."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_Block() for _ in range(depth)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if x.abs().mean() > 0:
                x = block(x)
        return self.head(x).square().mean()


def _shares(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    budget: str,
    from_step: int,
    change: Callable[[nn.Module, int], object] = lambda model, number: None,
) -> list[float]:
    """Of steps on these batches, equal to eager's, the peaks as shares of the budget, which is of the largest step. ``change``:
    what is done to the model before each."""
    plain, found = copy.deepcopy(model), []
    largest, wanted = 0, list[list[torch.Tensor | None]]()
    batches = [*batches]
    for number, x in enumerate(batches):
        change(plain, number)
        step = _step(plain, x)
        largest = max(largest, lowtide.measure(step).peak_bytes)
        wanted.append([None if one.grad is None else one.grad.clone() for one in plain.parameters()])
    lowtide.rematerialize(model, (batches[0],), budget=budget)
    for number, (x, gradients) in enumerate(zip(batches, wanted, strict=True)):
        change(model, number)
        found.append(lowtide.measure(_step(model, x)).peak_bytes / (float(budget[:-1]) / 100 * largest))
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            assert (one.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(one.grad, gradient)  # type: ignore[arg-type]
    assert not model.forward.is_online
    return found[from_step:]


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def test_frozen_layers_are_not_expected_to_run_by_plans() -> None:
    """They were counted as their siblings are, and the share that was asked for was of more than steps take."""
    model = _Decided()
    model.blocks[:3].requires_grad_(False)
    shares = _shares(model, [torch.randn(32, WIDTH, WIDTH)] * 4, "50%", 2)
    assert max(shares) <= 1.01


def test_a_small_first_step_is_no_reason_to_refuse_larger_ones() -> None:
    """A percentage is of the largest step: what the first part of one needs is known to be too much at its end alone."""
    batches = [torch.randn(rows, WIDTH, WIDTH) for rows in (2, 32, 32, 32, 32)]
    assert max(_shares(_Decided(), batches, "50%", 3)) <= 1.01


def test_a_tiny_first_step_in_which_gradients_do_not_fit() -> None:
    batches = [torch.randn(rows, rows, WIDTH) for rows in (1, 48, 1, 48, 48)]
    assert max(_shares(_Decided(), batches, "50%", 3)) <= 1.01


def test_more_is_trained_in_later_steps() -> None:
    """A percentage is of the steps that take most: of those in which all layers are trained, though batches are no larger."""

    def thaw(model: nn.Module, number: int) -> None:
        model.blocks.requires_grad_(number >= 4)  # type: ignore[index, union-attr]

    assert max(_shares(_Decided(), [torch.randn(32, WIDTH, WIDTH)] * 8, "50%", 5, thaw)) <= 1.01


class _Experts(nn.Module):
    """Another program in every call, by the rows that each of its experts gets."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 4 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(8, WIDTH, 4 * WIDTH) / 16)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for expert in range(len(self.up)):
            rows = torch.where(chosen == expert)[0]
            found.index_add_(0, rows, F.linear(F.gelu(F.linear(x[rows], self.up[expert])), self.down[expert]))
        return found


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.gate = nn.ModuleList(_Block() for _ in range(3)), nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(_Experts() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            scores = self.gate(x).softmax(-1)
            x = x + experts(x, scores.argmax(-1)) * scores.amax(-1, keepdim=True)
        return x.square().mean()


def test_a_percentage_is_not_of_what_the_first_step_planned_in_vain() -> None:
    """The gradients that a plan of experts would hold, each as large as all of a parameter, are none that eager holds."""
    model = _Mixture()
    plain, peaks = copy.deepcopy(model), []
    batches = [torch.randn(512, WIDTH) for _ in range(5)]
    lowtide.rematerialize(model, (batches[0],), budget="75%")
    for x in batches:
        for one in (plain, model):
            one.zero_grad()
            peaks.append(lowtide.measure(_step(one, x)).peak_bytes)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert max(peaks[5::2]) <= 0.7575 * max(peaks[::2])

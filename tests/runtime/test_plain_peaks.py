"""A budget in percent of a model in parts is a share of what plain PyTorch takes."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.parts.shared import SharedBudget
from lowtide.settings import Settings
from tests.support.networks import LookedAt

WIDTH, ROWS = 32, 1024
BLOCKS = 6


class _Quantized(nn.Module):
    """Reads its argument once, and nothing of it in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x / 3)))


class _Scaled(nn.Module):
    """What it hands to a block is held by nobody else, or also written into, so that plans copy it."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Quantized() for _ in range(BLOCKS))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            scaled = 2 * x
            x = block(scaled) + 1
            if self.writes:
                scaled.add_(1)
            if x.abs().sum() > 1e30:
                raise OverflowError
        return x.square().mean()


def _plain_peak_bytes(model: nn.Module, x: torch.Tensor) -> int:
    peaks = []
    for _ in range(2):
        model.zero_grad()
        peaks.append(lowtide.measure(lambda: model(x).backward()).peak_bytes)
    return peaks[-1]


@pytest.mark.parametrize("writes", [False, True])
def test_what_plans_alone_hold_is_no_part_of_what_a_percentage_is_of(writes: bool) -> None:
    """Arguments that plain PyTorch lets go of, and copies of those that are written into."""
    model, x = _Scaled(writes), torch.randn(ROWS, WIDTH)
    plain = _plain_peak_bytes(copy.deepcopy(model), x)
    lowtide.rematerialize(model, (x,), budget="80%")
    for _ in range(4):
        model.zero_grad()
        peak_bytes = lowtide.measure(lambda: model(x).backward()).peak_bytes
    assert len(lowtide.plans(model)) == BLOCKS
    assert 0.79 * plain <= model.forward.parts.shared.budget.granted_bytes <= 0.81 * plain
    assert peak_bytes <= 0.81 * plain


def test_all_of_what_plain_steps_take_is_enough_for_plans_that_keep_everything() -> None:
    """Though these hold their arguments, too: nobody asked for less."""
    model, x = _Scaled(False), torch.randn(ROWS, WIDTH)
    lowtide.rematerialize(model, (x,), budget="100%", planner="auto{effort=3}")
    for _ in range(4):
        model.zero_grad()
        model(x).backward()
    assert [plan.overhead for plan in lowtide.plans(model)] == [0.0] * BLOCKS


class _Overflowing(nn.Module):
    """Runs by another branch while its threshold is low, as in a first step that finds out how large values are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        self.most: torch.Tensor
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        if (x.detach().abs() > self.most).any():
            self.most = 2 * x.detach().abs().max()
            x = x * float(self.most) / self.most
        return x


def test_calls_that_first_run_as_they_are_are_not_counted_twice() -> None:
    model = LookedAt(block for _ in range(BLOCKS // 2) for block in (_Overflowing(), _Quantized()))
    x = torch.randn(ROWS, WIDTH)
    plain = _plain_peak_bytes(copy.deepcopy(model), x)
    lowtide.rematerialize(model, (x,), budget="60%")
    for _ in range(5):
        model.zero_grad()
        model(x).backward()
    # A plan writes over what it needs no more, which plain PyTorch does not.
    assert 0.55 * plain <= model.forward.parts.shared.budget.granted_bytes <= 0.61 * plain


class _Penalised(nn.Module):
    """Differentiates what it contains within its own forward pass, so many ``times``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Softplus(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        slope, added = torch.ones_like(y), torch.zeros_like(y)
        for _ in range(self.times):
            (slope,) = torch.autograd.grad(y, x, slope, create_graph=True)
            added = added + 0.1 * slope
        y = y + added
        if y.abs().sum() > 1e30:
            raise OverflowError
        return y


class _Residual(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Penalised(times) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("times", [1, 6])
def test_modules_that_run_again_with_all_backward_passes_within_them_take_no_more(times: int) -> None:
    """PyTorch's checkpointing holds a run of a module for each backward pass within it that is differentiated in turn."""
    model, x = _Residual(times), torch.randn(ROWS // 4, WIDTH)
    plain = _plain_peak_bytes(copy.deepcopy(model), x)
    lowtide.rematerialize(model, (x,), budget="60%")
    peaks = []
    for _ in range(6):
        model.zero_grad()
        peaks.append(lowtide.measure(lambda: model(x).backward()).peak_bytes)
    assert max(peaks) <= plain * 1.01
    assert peaks[-1] <= 0.6 * plain * 1.01


class _Interrupted(nn.Module):
    """An interrupt comes before one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Quantized() for _ in range(BLOCKS))
        self.interrupted: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.interrupted:
                raise KeyboardInterrupt
            x = block(x)
            if x.abs().sum() > 1e30:
                raise OverflowError
        return x.square().mean()


@pytest.mark.parametrize("interrupted", [1, 3])
def test_a_step_that_is_broken_off_is_not_what_a_percentage_is_of(interrupted: int) -> None:
    """As by the user of a notebook, who runs the cell again."""
    model, x = _Interrupted(), torch.randn(ROWS, WIDTH)
    plain = _plain_peak_bytes(copy.deepcopy(model), x)
    lowtide.rematerialize(model, (x,), budget="75%")
    model.interrupted = interrupted
    with contextlib.suppress(KeyboardInterrupt):  # nobody keeps the frames
        model(x)
    model.interrupted = None
    for _ in range(5):
        model.zero_grad()
        peak_bytes = lowtide.measure(lambda: model(x).backward()).peak_bytes
    assert peak_bytes <= 0.76 * plain
    assert 0.74 * plain <= model.forward.parts.shared.budget.granted_bytes <= 0.76 * plain


def test_nothing_is_learned_from_a_step_that_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, device = list[int](), torch.device("cpu")
    shared = SharedBudget(Settings(budget="75%"))
    monkeypatch.setattr(shared, "_note_step", lambda: noted.append(shared.steps) is None)
    for interrupted in (False, True, False, False):
        with contextlib.suppress(KeyboardInterrupt), shared.call(device):
            if interrupted:
                raise KeyboardInterrupt
    assert noted == [0, 1, 3]

"""Models that check values in their forward pass: one program for the usual answers, and others where a call needs them."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.api import runtime_of
from tests.support.beside import assert_same_steps, plain_and_planned

Check = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 32


class _Checking(nn.Module):
    """Blocks with dropout and running statistics, and a check between them, as the models of DETR's family have it."""

    def __init__(self, check: Check, counts: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, WIDTH))
            for _ in range(2)
        )
        self.check, self.counts = check, counts
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.check(x + block(x))
        if self.counts:
            self.calls += 1
            self.last = x.detach().mean()
        return x.square().mean()


def _clamped(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        x = torch.nan_to_num(x, 0.0, 9.0, -9.0)
    return x


def _replaced(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 9.0, -9.0) if (torch.isnan(x).any() | torch.isinf(x).any()).item() else x


def _asserted(x: torch.Tensor) -> torch.Tensor:
    assert (x.exp() > 0).all()
    assert not (x.abs() < 0).any()
    return x


def _close(x: torch.Tensor) -> torch.Tensor:
    return x if torch.allclose(x, x * 1) else x * 0


def _equal(x: torch.Tensor) -> torch.Tensor:
    """As kernels of Gaussian processes ask whether they are between points and themselves."""
    assert not torch.equal(x, x[1:])
    return x if torch.equal(x / 3, x.detach() / 3) else x * 0


def _unequal(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if torch.equal(x.clamp(-50, 50), x) else x.clamp(-9, 9)


def _likelihood(x: torch.Tensor) -> torch.Tensor:
    return x * F.gaussian_nll_loss(x, x + 1, x.square() + 1)


def _large(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-9, 9) if (x.abs() > 50).any() else x


def _extremes(x: torch.Tensor) -> torch.Tensor:
    assert x.sigmoid().min() >= 0
    assert not x.abs().amin() < 0
    return x.clamp(-9, 9) if x.max() > 50 else x


def _dropped_out_never(x: torch.Tensor) -> torch.Tensor:
    """As adapters drop their modules out, with a probability of zero. A uniform number is zero once in 16 million times."""
    if torch.rand(1) > 0.0:
        x = 2 * x
    return x * 3 if torch.rand(()) <= 0 or torch.rand(1).item() <= 0 else x


def _windowed(x: torch.Tensor) -> torch.Tensor:
    """PyTorch asks whether the least sum of windows is tiny, which are no constants here."""
    window = torch.ones(16) + 0 * x.detach().flatten()[:16]
    transformed = torch.stft(x, 16, 4, window=window, return_complex=True)
    return torch.istft(transformed, 16, 4, window=window, length=x.shape[-1])


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _trained(
    check: Check, factors: list[float], rows: tuple[int, ...] = (64,), *, apart: bool = False
) -> tuple[nn.Module, int]:
    """A planned model after steps on inputs that are multiplied by ``factors``, with these numbers of rows in turn, each equal
    to eager's to the bit; and how many programs it has. ``apart``: whether calls have run in parts."""
    torch.manual_seed(0)
    plain = _Checking(check, counts=len(rows) == 1)  # calls that leave something behind are captured for each shape
    model = copy.deepcopy(plain)
    dynamic = True if len(rows) > 1 else None
    lowtide.rematerialize(model, (torch.randn(64, WIDTH),), budget="80%", dynamic=dynamic)
    pairs = [(each, torch.optim.SGD(each.parameters(), 1e-4)) for each in (plain, model)]
    for number, factor in enumerate(factors):
        found = []
        for each, optimizer in pairs:
            torch.manual_seed(number)
            random.seed(number)
            x = factor * torch.randn(rows[number % len(rows)], WIDTH)
            optimizer.zero_grad()
            loss = each(x)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in each.parameters()), *each.buffers(), each.last])
            found[-1] += [torch.get_rng_state(), torch.tensor(random.random())]
            optimizer.step()
        assert all(map(_same, *found))
    assert plain.calls == model.calls == len(factors) * (len(rows) == 1)
    runtime = runtime_of(model)
    assert runtime is not None
    assert (runtime.parts is not None) == apart
    return model, sum(map(len, runtime.entries.values()))


@pytest.mark.parametrize(
    "check",
    [_clamped, _replaced, _asserted, _close, _equal, _likelihood, _large, _extremes, _windowed, _dropped_out_never],
)
def test_the_usual_answers_are_one_program(check: Check) -> None:
    _, programs = _trained(check, [1.0, 1.0, 1.0])
    assert programs == 1


def test_a_trace_that_fails_for_a_known_reason_says_nothing_of_numbers() -> None:
    """The first trace of a process in which pytest looks at assertions: something else changes in its backward pass."""
    alone = [f"{__file__}::{test_the_usual_answers_are_one_program.__name__}", "-k", _asserted.__name__]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *alone]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("check", [_clamped, _large, _extremes, _unequal])
def test_a_call_that_goes_otherwise_has_a_program_of_its_own(check: Check) -> None:
    """Nothing of the first try is left: neither draws, nor statistics, nor what the model counts."""
    unusual = float("inf") if check is _clamped else 1e4
    _, programs = _trained(check, [1.0, unusual, 1.0, unusual, unusual, 1.0])
    assert programs == 2


def test_programs_of_a_family_go_otherwise_too() -> None:
    _, programs = _trained(_large, [1.0, 1.0, 1.0, 1e4, 1.0, 1e4, 1.0, 1.0], (64, 48, 40, 56))
    assert programs == 4 + 2


def _drawn(x: torch.Tensor) -> torch.Tensor:
    return _clamped(x * 2 if random.random() < 2 else x)


def test_draws_of_python_are_taken_once() -> None:
    _, programs = _trained(_drawn, [1.0, float("inf"), 1.0])
    assert programs == 2


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return x if (torch.rand(2) < 0.5).any() else x * 2


class _Stabilised(nn.Module):
    """Recurrent layers that normalize their gates by what they hold, which is nothing in the first step, as those of xLSTM."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(2 * WIDTH, 3 * WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate in self.gates:
            held = weight = most = hidden = torch.zeros_like(x[0])
            steps = []
            for step in x:
                given, kept, value = gate(torch.cat((step, hidden), 1)).chunk(3, 1)
                kept = F.logsigmoid(kept) + most
                most = given if torch.all(weight == 0) else torch.maximum(given, kept)
                held = (kept - most).exp() * held + (given - most).exp() * value.tanh()
                weight = (kept - most).exp() * weight + (given - most).exp()
                hidden = held / weight
                steps.append(hidden)
            x = torch.stack(steps)
        return x.square().mean()


@pytest.mark.parametrize("layers", [1, 4])
def test_checks_in_loops_go_as_in_the_step_or_the_layer_before(layers: int) -> None:
    torch.manual_seed(0)
    plain = _Stabilised(layers)
    model = lowtide.rematerialize(copy.deepcopy(plain), (torch.randn(6, 64, WIDTH),), budget="60%")
    for each in (plain, model):
        for seed in range(3):
            each(torch.randn(6, 64, WIDTH, generator=torch.Generator().manual_seed(seed))).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    runtime = runtime_of(model)
    assert runtime is not None and runtime.parts is None
    assert sum(map(len, runtime.entries.values())) == (2 if layers == 1 else 3)


def test_a_check_that_goes_every_way_is_none() -> None:
    """It is a decision by random numbers: the model runs in parts, or is refused."""
    torch.manual_seed(0)
    plain = _Checking(_dropped)
    model, strict = copy.deepcopy(plain), copy.deepcopy(plain)
    lowtide.rematerialize(model, (torch.randn(64, WIDTH),), budget="90%")
    for number in range(12):
        losses = []
        for each in (plain, model):
            torch.manual_seed(number)
            losses.append(each(torch.randn(64, WIDTH)))
            losses[-1].backward()
        assert torch.equal(*losses)
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.parts is not None
    lowtide.rematerialize(strict, (torch.randn(64, WIDTH),), budget="90%", on_capture_error="error")
    with pytest.raises(lowtide.CaptureError, match=r"what it checks in the forward pass went in 3 ways"):
        for number in range(12):
            torch.manual_seed(number)
            strict(torch.randn(64, WIDTH)).backward()


def _counted(x: torch.Tensor) -> torch.Tensor:
    """What is done for large values depends on how many there are, which no program can know."""
    large = x.detach().abs() > 50
    return x / len(x[large]) if large.any() else x


def test_calls_that_go_where_no_program_can_run_apart_alone() -> None:
    """All others keep the program."""
    model, programs = _trained(_counted, [1.0, 1e4, 1.0, 1.0, 1e4, 1.0], apart=True)
    runtime = runtime_of(model)
    assert runtime is not None
    assert (programs, runtime.ran) == (1, 4)


class _Prepared(_Checking):
    """Initialized from the first batch."""

    def __init__(self) -> None:
        super().__init__(_large, counts=False)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.scale.copy_(x.std())
            self.ready.fill_(True)
        return super().forward(x / self.scale)


class _Outer(nn.Module):
    """Runs in parts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x)
        return loss * 2 if float(loss.detach()) > 0 else loss


@pytest.mark.parametrize("inner", [lambda: _Checking(_counted), _Prepared], ids=["counted", "prepared"])
def test_calls_of_a_part_that_go_where_no_program_can(inner: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = _Outer(inner())
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, budget="80%")
    for number, factor in enumerate([1.0, 1e4, 1.0, 1e4, 1.0]):
        found = []
        for each in (plain, model):
            torch.manual_seed(number)
            each.zero_grad()
            each(factor * torch.randn(64, WIDTH)).backward()
            found.append([*(p.grad for p in each.parameters()), *each.buffers(), torch.get_rng_state()])
        assert all(map(torch.equal, *found))
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.parts is not None
    assert "inner" in [part.name for part in runtime.parts.planned()]


def test_calls_that_mostly_go_where_no_program_can_run_in_parts() -> None:
    _, programs = _trained(_counted, [1.0] * 2 + [1e4] * 17 + [1.0], apart=True)
    assert programs == 0


def test_a_failing_check_is_the_models_own_error() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        if not (x < 1e5).all():
            raise ValueError("too large")
        return x

    model, _ = _trained(positive, [1.0])
    runtime = runtime_of(model)
    assert runtime is not None
    with pytest.raises((ValueError, lowtide.CaptureError), match="too large"):
        model(1e9 * torch.ones(64, WIDTH))
    model(torch.randn(64, WIDTH)).backward()
    assert runtime.parts is None and not runtime.is_online


class _Decaying(nn.Module):
    """Checks a running statistic that it has just updated, as code books do that replace their dead codes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.register_buffer("size", torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.block(x)
        with torch.no_grad():
            self.size.lerp_(torch.zeros(8), 0.3)
            if torch.any(self.size < 0.5):
                self.size.fill_(1.0)
        return x.square().mean(), x.abs().mean()


def test_a_forward_pass_that_runs_again_does_not_check_again() -> None:
    """For gradients that arrive otherwise: what it checks has been updated since."""
    plain = _Decaying()
    model, x = copy.deepcopy(plain), torch.randn(64, WIDTH)
    lowtide.rematerialize(model, (x,), budget="90%")
    for step in range(5):
        for one in (plain, model):
            one.zero_grad()
            sum(one(x)[: 1 + step % 2]).backward()
        for (name, parameter), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad), name
        assert torch.equal(plain.size, model.size)


class _Initialized(nn.Module):
    """Its first batch shifts it, as activation normalization and codebooks have it: a flag in a buffer says that it has."""

    def __init__(self, ask: Callable[[torch.Tensor], bool], flag: torch.Tensor, by_data: bool) -> None:
        super().__init__()
        self.layer, self.ask, self.by_data = nn.Linear(8, 8), ask, by_data
        self.register_buffer("ready", flag)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if not self.ask(self.ready):
            rows = torch.bincount(h.detach().argmax(1)).argmax() if self.by_data else 2
            self.mean.copy_(h.detach()[:rows].sum(0))
            self.ready.fill_(1)
        return (h - self.mean).square().sum()


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("flag", [torch.tensor(0.0), torch.zeros(1), torch.zeros(1, dtype=torch.long)])
@pytest.mark.parametrize("ask", [bool, lambda flag: flag > 0, lambda flag: flag == 1, lambda flag: flag.item()])
def test_a_model_that_its_first_batch_initializes_is_one_program_from_then_on(
    ask: Callable[[torch.Tensor], bool], flag: torch.Tensor, by_data: bool
) -> None:
    plain, planned = plain_and_planned(lambda: _Initialized(ask, flag.clone(), by_data))
    calls = []

    def step(model: Any, number: int) -> Any:
        loss = model(torch.randn(6, 8))
        loss.backward()
        if model is planned:
            calls.append(sum(max(one.calls, 0) for ones in model.forward.entries.values() for one in ones))
        return loss

    assert_same_steps(plain, planned, step, 6)
    assert calls[-1] - calls[2] == 3

"""Functions with a backward pass of their own: planned where they can be traced, a boundary of parts where they cannot, and
equal to the bit in both."""

from __future__ import annotations

import collections
import ctypes
import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import lowtide
from tests.support.stepping import LeftBehind, assert_same, steps
from tests.support.training import QUICK

WIDTH = 64
_SAMPLE = torch.zeros(8, 32, WIDTH)
_STATE: dict[str, Any] = {"calls": 0, "seen": []}
Function = type[torch.autograd.Function]


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class _SetUp(_Saving):
    @staticmethod
    def forward(x: torch.Tensor) -> Any:  # type: ignore[override]
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])


class _Attributes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.result, ctx.factor = x.tanh(), 3
        return ctx.result * ctx.factor

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * (1 - ctx.result.square()) * ctx.factor


class _Sorting(torch.autograd.Function):
    """A result without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, indices = x.sort(-1)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        return torch.zeros_like(g).scatter(-1, ctx.saved_tensors[0], g)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        x.mul_(0.5).tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * (1 - ctx.saved_tensors[0].square()) * 0.5


class _Masking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        mask = (torch.rand_like(x) > 0.2).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * ctx.saved_tensors[0] * (torch.rand_like(g) > 0.1)


class _LossWithGradient(torch.autograd.Function):
    """Computes the gradient in the forward pass, in chunks, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        rows = x.flatten(0, -2)
        gradient, loss = torch.zeros_like(rows), x.new_zeros(())
        for part in range(0, len(rows), 64):
            chunk = rows[part : part + 64]
            target = torch.arange(len(chunk)) % chunk.shape[-1]
            probabilities = torch.softmax(chunk, -1)
            loss += F.cross_entropy(chunk, target, reduction="sum") / len(rows)
            probabilities[torch.arange(len(chunk)), target] -= 1
            gradient[part : part + 64] = probabilities / len(rows)
        ctx.save_for_backward(gradient.view_as(x))
        return loss

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0].mul_(g)


class _Attention(torch.autograd.Function):
    """Keeps its result and the sums of its rows, and computes the weights again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        scores = x @ x.mT / 8
        sums = torch.logsumexp(scores, -1, keepdim=True)
        result = torch.exp(scores - sums) @ x
        ctx.save_for_backward(x, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, result, sums = ctx.saved_tensors
        weights = torch.exp(x @ x.mT / 8 - sums)
        scores = weights * (g @ x.mT - (g * result).sum(-1, keepdim=True)) / 8
        return weights.mT @ g + scores @ x + scores.mT @ x


class _NumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.numpy()))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * torch.from_numpy(np.cos(ctx.saved_tensors[0].numpy()))


class _Copying(torch.autograd.Function):
    """By addresses, as extensions do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        x, y = x.contiguous(), torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), 4 * x.numel())
        ctx.save_for_backward(y)
        return y.tanh()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * (1 - ctx.saved_tensors[0].tanh().square())


class _WithGeneratorState(_Masking):
    """Draws the same numbers in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.state = torch.get_rng_state()
        return x * (torch.rand_like(x) > 0.2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            return g * (torch.rand_like(g) > 0.2)


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        _STATE["calls"] += 1
        ctx.factor = 1 + _STATE["calls"] / 100
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * ctx.factor


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x.clone()


class _NoisyBackward(_Passing):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * torch.from_numpy(np.random.rand(*g.shape).astype("float32")) * random.random()


class _NotingBackward(_Passing):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        _STATE["seen"].append(tuple(g.shape))
        return g * 0.5


class _DecidingBackward(_Passing):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * (2 if g.sum().item() > 0 else 1)


class _WritingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor) -> Any:
        ctx.mean = mean
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.mean.add_(g.abs().mean())
        return g * 0.5, None


class _Inner(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.function is _WritingBackward:
            return self.function.apply(x, self.mean)  # type: ignore[no-any-return]
        result: Any = self.function.apply(x)
        return result[0] if isinstance(result, tuple) else result


class _Blocks(nn.Module):
    """A function between submodules that can be planned whatever it does."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.inner = nn.ModuleList(_Inner(function) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for feed, inner in zip(self.feeds, self.inner, strict=True):
            x = x + inner(feed(x))
        return x.square().mean()


def _forgotten() -> None:
    _STATE.update(calls=0, seen=[])


def _steps(model: nn.Module) -> list[LeftBehind]:
    _forgotten()
    return list(steps(model, (8, 32, WIDTH), 4, lambda: (_STATE["calls"], len(_STATE["seen"]))))


def _compare(function: Function, share: float) -> tuple[nn.Module, float]:
    """The planned model, after steps that were equal to eager's to the bit; and the last peak as a share of the budget."""
    plain, model = (_seeded(function) for _ in range(2))
    expected = _steps(plain)
    budget = int(share * max(peak for _, _, peak in expected))
    _forgotten()
    lowtide.rematerialize(model, (_SAMPLE,), budget=budget, planner=QUICK)
    found = _steps(model)
    assert_same(expected, found)
    return model, found[-1][2] / budget


def _seeded(function: Function) -> _Blocks:
    torch.manual_seed(0)
    return _Blocks(function)


@pytest.mark.parametrize(
    "function", [_Saving, _SetUp, _Attributes, _Sorting, _InPlace, _Masking, _Attention], ids=lambda one: one.__name__
)
def test_traced_functions_are_planned(function: Function) -> None:
    model, peak = _compare(function, 0.55)
    (plan,) = lowtide.plans(model)
    assert peak <= 1 and plan.overhead > 0


def test_a_loss_that_computes_its_gradient_in_the_forward_pass() -> None:
    class Model(_Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for feed in self.feeds:
                x = x + feed(x)
            return _LossWithGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    torch.manual_seed(0)
    plain = Model(_Saving)
    del plain.inner
    model = Model(_Saving)
    del model.inner
    model.load_state_dict(plain.state_dict())
    expected = list(_steps(plain))
    budget = int(0.6 * max(peak for _, _, peak in expected))
    lowtide.rematerialize(model, (_SAMPLE,), budget=budget)
    for (tensors, *_), (ours, _, peak) in zip(expected, _steps(model), strict=True):
        assert peak <= budget
        assert all(itertools.starmap(torch.equal, zip(tensors, ours, strict=True)))


@pytest.mark.parametrize(
    "function",
    [
        *(_NumPy, _Copying, _WithGeneratorState, _Counting),
        *(_NotingBackward, _WritingBackward),
    ],
    ids=lambda one: one.__name__,
)
def test_functions_that_no_trace_follows_are_boundaries(function: Function) -> None:
    """Of parts: what runs again then finds generators and the state outside of the model as it did before."""
    model, peak = _compare(function, 0.7)
    assert peak <= 1
    assert len(lowtide.plans(model)) == 3


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_DecidingBackward, "depends on the values of floating-point"),
        (_NoisyBackward, r"backward pass .* changes the state of a random generator \(rand\)"),
        (_NotingBackward, r"backward pass .* changes .*_STATE"),
        (_WritingBackward, "writes into a buffer or an argument in the backward pass"),
    ],
)
def test_effects_of_backward_passes_are_refused(function: Function, why: str) -> None:
    _STATE["seen"] = []
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.plan(_Blocks(function), (_SAMPLE,), budget="60%")
    assert _STATE["seen"] == []


def test_effects_of_hooks_are_refused() -> None:
    class Watched(_Blocks):
        def __init__(self) -> None:
            super().__init__(_Saving)
            self.norms: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.feeds[0](x)
            x.register_hook(self.note)
            return x.square().mean()

        def note(self, gradient: torch.Tensor) -> None:
            self.norms.append(gradient.norm())

    with pytest.raises(lowtide.CaptureError, match=r"hook.* changes norms"):
        lowtide.plan(Watched(), (_SAMPLE,), budget="60%")


class _Watch(threading.Thread):
    """Counts and notes what passes there were, where it is told of one; ``times`` of them."""

    def __init__(self, times: int, seen: Any) -> None:
        super().__init__(daemon=True)
        self.times, self.latest, self.seen = times, 0.0, seen
        self.told, self.noted = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        for number in range(self.times):
            self.told.acquire()
            self.latest = number + 0.5
            self.seen.append(number)
            self.noted.release()

    def tell(self) -> None:
        if self.is_alive():
            self.told.release()
            self.noted.acquire()


@pytest.mark.parametrize("own", [True, False], ids=["in its own state", "once, elsewhere"])
def test_what_another_thread_does_meanwhile_is_no_effect(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state, as a progress bar's monitor, at any time; elsewhere it does so in one trace, and in no other one."""
    monkeypatch.setitem(_STATE, "seen", [])
    watch = _Watch(100, _Unfollowed()) if own else _Watch(1, _STATE["seen"])
    monkeypatch.setitem(_STATE, "watch", watch)
    lowtide.plan(_Blocks(_Telling), (_SAMPLE,), budget="60%")
    assert watch.latest >= 0.5


class _Unfollowed(collections.deque[int]):
    """What fills itself is no container that code fills."""


class _Telling(_Passing):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        _STATE["watch"].tell()
        return g * 0.5

"""Numbers that a forward pass reads of tensors that it has computed: one program for all calls, whatever they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.support.beside import assert_same_steps, plain_and_planned

STEPS = 7
Compute = Callable[[Any, torch.Tensor], Any]


class _Reads(nn.Module):
    """Returns what ``compute(self, h)`` makes of its hidden rows: a loss, or a loss and numbers."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.compute = compute
        self.log: dict[str, float] = {}
        self.history: list[float] = []
        self.best, self.average, self.total, self.drop = math.inf, 0.0, 0.0, 0.3

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, self.second(torch.tanh(self.first(x))))

    def left(self) -> tuple[Any, ...]:
        return dict(self.log), [*self.history], self.best, self.average, self.total


def _logged(self: Any, h: torch.Tensor) -> Any:
    loss, size = h.square().mean(), h.abs().mean()
    self.log["loss"], self.log["both"] = loss.item(), round(loss.item() + size.item(), 4)
    self.history.append(size.detach().item())
    self.total = 2 * loss.item()
    return loss + size, {"loss": loss.item(), "sizes": [size.item(), -size.item()], "rows": len(h)}


def _scaled(self: Any, h: torch.Tensor) -> Any:
    return (h / h.abs().max().item()).square().sum()


def _bounded(self: Any, h: torch.Tensor) -> Any:
    return h.clamp(min=h.max().item() - 0.5).square().mean() + (h + 1).clamp_(max=h.mean().item() + 1).sum()


def _by_mathematics(self: Any, h: torch.Tensor) -> Any:
    return (h * math.log1p(h.norm().item())).square().mean() * math.exp(-h.std().item())


def _backwards(self: Any, h: torch.Tensor) -> Any:
    scale, shift = h.std().item(), h.mean().item()
    return ((h - shift) * (1 / (scale + 1e-6)) + h.masked_fill(h > shift, shift * scale)).exp().mean()


def _whole_numbers(self: Any, h: torch.Tensor) -> Any:
    above = (h > -3).sum().item()
    return h.square().sum() / above, above, h.argmax().item()


def _listed(self: Any, h: torch.Tensor) -> Any:
    return sum(weight * h[:, i] for i, weight in enumerate(h.mean(0)[:3].tolist())).square().mean()


def _converted(self: Any, h: torch.Tensor) -> Any:
    above = int((h > -3).sum())
    sizes = {name: float(one.detach()) for name, one in (("max", h.max()), ("mean", h.mean()))}
    ratio = float(h.std().item()) if isinstance(above, int) else None
    return h.square().sum() / above * ratio, sizes, above


def _drawn(self: Any, h: torch.Tensor) -> Any:
    return (h * torch.rand(()).item()).square().mean()


def _single_precision(self: Any, h: torch.Tensor) -> Any:
    half = h.bfloat16()
    return (half * half.abs().max().item()).float().square().mean() + (h.double() / h.norm().item()).float().sum()


def _temperature(self: Any, h: torch.Tensor) -> Any:
    return F.softmax(h / (0.1 + h.std().item()), -1).square().sum()


class _Rounded(torch.autograd.Function):
    """To steps of a scale, straight through, and with a gradient that the scale bounds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient.clamp(max=ctx.scale) * (1 + ctx.scale), None


def _quantized(self: Any, h: torch.Tensor) -> Any:
    return _Rounded.apply(h, h.detach().abs().max().item() / 127).square().mean()


def _of_parameters(self: Any, h: torch.Tensor) -> Any:
    return (h * self.second.bias[0].item() + self.first.weight.norm().item()).square().mean()


def _in_place(self: Any, h: torch.Tensor) -> Any:
    h = h.clone()
    h *= h.abs().max().item()
    h[0].add_(h.mean().item())
    return h.square().mean()


ONE_PROGRAM = [
    _quantized, _of_parameters, _in_place,
    _logged, _scaled, _bounded, _by_mathematics, _backwards, _whole_numbers, _listed, _converted, _drawn, _single_precision,
    _temperature,
]  # fmt: skip


def _above(self: Any, h: torch.Tensor) -> Any:
    norm = h.norm().item()
    return (h * (1 / norm) if norm > 0.5 else h).square().mean()


def _at_least(self: Any, h: torch.Tensor) -> Any:
    return (h / max(0.01, h.std().item()) + min(h.abs().max().item(), 1e9)).square().mean()


def _not_finite(self: Any, h: torch.Tensor) -> Any:
    loss = h.square().mean()
    if math.isnan(loss.item()) or not math.isfinite(loss.item()):
        raise ValueError("diverged")
    return loss


def _asked_by_numpy(self: Any, h: torch.Tensor) -> Any:
    loss = h.square().mean()
    if not np.isfinite(loss.item()) or np.float64(1e9) <= loss.item():
        raise ValueError("diverged")
    return loss * 2 if loss.item() > np.float64(1e-9) else loss


def _moving_average(self: Any, h: torch.Tensor) -> Any:
    self.average = 0.9 * self.average + 0.1 * h.abs().mean().item()
    return h.square().mean() / (1 + self.average)


def _by_turns(self: Any, h: torch.Tensor) -> Any:
    many = int((h > 0).sum())
    h = h * 2 if many // 2 % 2 == 0 else h
    return h.square().mean(), many % 5


FEW_PROGRAMS = [_above, _at_least, _not_finite, _asked_by_numpy, _moving_average, _by_turns]


def _best_so_far(self: Any, h: torch.Tensor) -> Any:
    size = h.abs().mean().item()
    if size < self.best:
        self.best = size
    return h.square().mean(), size - self.best


def _how_many(self: Any, h: torch.Tensor) -> Any:
    self.history.append(h.mean().item())
    return h.square().mean() * (2 if len(self.history) > 4 else 1)


def _of_a_container(self: Any, h: torch.Tensor) -> Any:
    self.log["average"] = 0.9 * self.log.get("average", 1.0) + 0.1 * h.abs().mean().item()
    return h.square().mean() / self.log["average"]


def _sum_of_a_history(self: Any, h: torch.Tensor) -> Any:
    self.history.append(h.mean().item())
    return h.square().mean() * (1 + sum(self.history))


def _as_an_index(self: Any, h: torch.Tensor) -> Any:
    return h[:, h.mean(0).argmax().item()].square().mean()


def _as_a_size(self: Any, h: torch.Tensor) -> Any:
    return h[: int((h[:, 0] > 0).sum()) + 1].square().mean()


def _as_text(self: Any, h: torch.Tensor) -> Any:
    return h.square().mean(), f"{h.mean().item():.3f}"


def _a_probability(self: Any, h: torch.Tensor) -> Any:
    return F.dropout(h, h.sigmoid().mean().item()).square().mean()


def _caught(self: Any, h: torch.Tensor) -> Any:
    try:
        number = int(f"{h.mean().item() * 0:.0f}")
    except TypeError:
        number = 7
    return h.square().mean() * (number + 1)


def _in_a_module(source: str) -> Compute:
    """A function whose module has nothing else in it."""
    variables: dict[str, Any] = {"__name__": "alone"}
    exec(source, variables)
    compute: Compute = variables["compute"]
    return compute


_told_apart = _in_a_module(
    "def compute(self, h):\n"
    "    number = float(h.detach().mean())\n"
    "    return h.square().mean() * (2 if type(number) is float else 3), number\n"
)
_by_its_type = _in_a_module(
    "def compute(self, h):\n"
    "    number = int((h > 0).sum())\n"
    "    return h.square().mean() * {float: 2, int: 3}[type(number)] * (1 + (type(number) in (int, str))), number\n"
)


def _very_many(self: Any, h: torch.Tensor) -> Any:
    return h.square().mean() * sum(h[i % 6, i % 8].item() for i in range(70))


OTHERS = [
    _best_so_far, _how_many, _of_a_container, _sum_of_a_history, _as_an_index, _as_a_size, _as_text, _a_probability, _caught,
    _told_apart, _by_its_type, _very_many,
]  # fmt: skip


def _step(model: Any, number: int, rows: int = 6) -> Any:
    """Of a step what the model returns and leaves."""
    model.zero_grad()
    returned = model(torch.randn(rows, 8))
    (returned[0] if isinstance(returned, tuple) else returned).backward()
    return returned, model.left()


def _steps(plain: Any, planned: Any, steps: int = STEPS) -> None:
    assert_same_steps(plain, planned, _step, steps)


@pytest.mark.parametrize("compute", ONE_PROGRAM)
def test_one_program_for_all_calls(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(lambda: _Reads(compute))
    caplog.set_level(logging.INFO, "lowtide")
    _steps(plain, planned)
    assert planned.forward.parts is None and not planned.forward.is_online
    assert "is captured again" not in caplog.text
    assert len(lowtide.plans(planned)) == 1


@pytest.mark.parametrize("compute", FEW_PROGRAMS)
def test_few_programs_where_they_are_compared(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    """One for each way in which that goes, which is found out by the first call that goes so; and an attribute becomes a
    number that changes once it has been seen to."""
    plain, planned = plain_and_planned(lambda: _Reads(compute))
    caplog.set_level(logging.INFO, "lowtide")
    _steps(plain, planned)
    assert planned.forward.parts is None and not planned.forward.is_online
    assert caplog.text.count("is captured again") <= 2


@pytest.mark.parametrize("compute", OTHERS)
def test_whatever_else_is_done_with_them_is_as_in_eager(compute: Compute) -> None:
    _steps(*plain_and_planned(lambda: _Reads(compute)))


def test_a_history_of_tensors_of_which_code_asks_how_long_it_is() -> None:
    """It grows with every call, and what depends on that is another program."""

    def compute(self: Any, h: torch.Tensor) -> Any:
        self.history.append(h.detach().mean())
        return h.square().mean() * (2 if len(self.history) > 4 else 1)

    _steps(*plain_and_planned(lambda: _Reads(compute)))


def test_a_history_that_is_emptied_between_steps_is_one_program(caplog: pytest.LogCaptureFixture) -> None:
    class Emptied(_Reads):
        def left(self) -> tuple[Any, ...]:
            found = super().left()
            self.history.clear()
            return found

    def compute(self: Any, h: torch.Tensor) -> Any:
        for row in h:
            self.history.append(row.mean().item())
        return h.square().mean() * len(self.history)

    plain, planned = plain_and_planned(lambda: Emptied(compute))
    caplog.set_level(logging.INFO, "lowtide")
    _steps(plain, planned)
    assert "is captured again" not in caplog.text


def test_an_error_of_the_model_is_raised_where_a_number_is_not_what_it_usually_is() -> None:
    _, planned = plain_and_planned(lambda: _Reads(_not_finite))
    planned(torch.ones(6, 8)).backward()
    with pytest.raises(ValueError, match="diverged"):
        planned(torch.full((6, 8), math.nan))


def test_calls_that_wait_keep_their_numbers() -> None:
    plain, planned = plain_and_planned(lambda: _Reads(_backwards))
    _steps(plain, planned, 1)
    for model in (plain, planned):
        model.zero_grad()
        losses = [model(torch.linspace(-1, scale, 48).reshape(6, 8)) for scale in (1.0, 3.0)]
        losses[0].backward()
        losses[1].backward()
    assert all(map(torch.equal, *([one.grad for one in model.parameters()] for model in (plain, planned))))


@pytest.mark.parametrize("compute", [_logged, _scaled, _temperature, _converted])
def test_calls_of_several_shapes(compute: Compute) -> None:
    """Numbers that are returned alone are no hindrance to a program of all lengths; those that operators take are."""
    plain, planned = plain_and_planned(lambda: _Reads(compute), dynamic=True)
    lengths = (6, 9, 4, 12, 6)
    assert_same_steps(plain, planned, lambda model, number: _step(model, number, lengths[number]), len(lengths))


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, h: h.square().mean() * (h.max().item() / h.std().item()),
        lambda self, h: h.square().mean() * (2.0 if 1 / h.std().item() > 1e9 else 1.0),
        lambda self, h: h.square().mean() / (1 / h.std().item()),
    ],
)
def test_a_division_by_zero_is_an_error_as_in_eager(compute: Compute) -> None:
    plain, planned = plain_and_planned(lambda: _Reads(compute))
    _steps(plain, planned, 2)
    for model in (plain, planned):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(6, 8)).backward()


def test_numbers_within_a_budget() -> None:
    """What computes them runs again as everything else does."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> Any:
            scales = []
            for layer in self.layers:
                x = layer(x)
                scales.append(x.abs().max().item())
                x = x / (scales[-1] + 0.1)
            return x.square().mean(), scales

    def step(model: Any, number: int) -> Any:
        model.zero_grad()
        loss, scales = model(torch.randn(64, 32))
        loss.backward()
        return loss, scales

    plain, planned = plain_and_planned(Deep, budget="60%", planner="auto{effort=1}")
    assert_same_steps(plain, planned, step, 3)
    (plan,) = lowtide.plans(planned)
    assert plan.overhead > 0

"""Numbers that are other ones in every call and that operators take are inputs of the program: one capture for all."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.fuzz.changed import Computes, Reversed, Thing, having, numbered_steps, rows
from tests.support.beside import plain_and_planned

STEPS = 12
Compute = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _annealed(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y + self.beta * y.square() - y / (1 + self.beta) + (1 - self.beta) * x


def _warmed_up(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return y * min(1.0, self.step / 8)


def _by_cosine(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (0.5 * (1 + math.cos(math.pi * self.step / 40))) + math.tanh(self.beta) * y.sin()


def _dropped(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(y, self.beta) + self.drop(x)


def _softened(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.gumbel_softmax(y, tau=self.tau) + F.softmax(y / self.tau, -1)


def _losses(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(y)) % 4
    smoothed = F.cross_entropy(y, labels, label_smoothing=self.beta)
    return smoothed + F.smooth_l1_loss(y, x, beta=self.tau) + F.huber_loss(y, x, delta=self.tau)


def _powers(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.abs() ** (3.2 + self.beta) + (1.1 + self.beta) ** y + torch.lerp(y, x, self.beta)


def _equal_to(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (torch.arange(4) == self.step % 5) + y * (self.beta == x) + y * (x != self.beta)


def _bases(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (1.1 + self.beta) ** y + torch.pow(self.tau + 3, y)


def _of_sums_with_products(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(y, x, self.linear.weight, beta=self.beta, alpha=self.tau + 1)
    return torch.baddbmm(y[None], x[None], self.linear.weight[None], alpha=self.beta)


def _reversed_operands(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return self.beta * y + self.beta / (y + 3) - (self.beta - y) + torch.add(y, x, alpha=self.beta)


def _in_place(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y *= self.beta
    y.add_(x, alpha=self.beta).clamp_(-self.tau, self.tau)
    return y.masked_fill(y > self.beta, self.beta)


def _as_a_tensor(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * torch.tensor(self.beta) + torch.full_like(y, self.beta) * x + torch.full((4,), self.tau)


def _an_integer(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.step + (x * 10).long() * self.step + torch.full((4,), self.step)


def _against_the_gradient(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Reversed.apply(y, self.beta)


def _of_a_configuration(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.config.loss.weight + y.exp() * self.config.rate


def _two_alike(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.beta + y.sin() * self.twin


def _of_two(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    share = self.beta * (1 - self.tau / 3) + self.step / (1 + self.tau)
    return y * share + y.square() * (self.beta * self.beta) - x / (self.beta + self.twin)


def _of_three(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (self.beta * self.tau * self.config.rate + 1) ** 2 + y * math.exp(-self.beta * self.tau)


def _against_another(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * max(self.beta, self.tau / 40) if self.beta < self.tau else y * self.tau


def _to_shares(model: Any, step: int) -> None:
    model.step, model.beta, model.tau, model.twin = step + 3, 0.03 * (step + 1), 2 * 0.95**step, 0.5 - 0.03 * step
    model.drop.p, model.config.rate, model.config.loss.weight = 0.5 - 0.03 * step, 0.1 * step + 0.05, 0.3 / (step + 1)


def _counting(model: Any, step: int) -> None:
    pass


def _to_large(model: Any, step: int) -> None:
    model.step = 10 ** (3 * step)


def _to_equal(model: Any, step: int) -> None:
    model.beta, model.twin = (0.1, 0.1) if step < 2 else (0.05 * step, 1 / step)


CASES: dict[str, tuple[Compute, Callable[[Any, int], None], int]] = {
    "annealed": (_annealed, _to_shares, 2),
    "warmed up by its own count": (_warmed_up, _counting, 2),
    "by a cosine": (_by_cosine, _to_shares, 2),
    "shares that are dropped": (_dropped, _to_shares, 2),
    "temperatures": (_softened, _to_shares, 3),
    "losses": (_losses, _to_shares, 3),
    "powers": (_powers, _to_shares, 3),
    "equal to": (_equal_to, _to_shares, 2),
    "powers of them": (_bases, _to_shares, 3),
    "sums with products": (_of_sums_with_products, _to_shares, 3),
    "on either side": (_reversed_operands, _to_shares, 2),
    "in place": (_in_place, _to_shares, 3),
    "as a tensor": (_as_a_tensor, _to_shares, 3),
    "an integer": (_an_integer, _to_shares, 2),
    "in the backward pass of a function": (_against_the_gradient, _to_shares, 2),
    "in a configuration": (_of_a_configuration, _to_shares, 3),
    "an integer that grows beyond all": (lambda self, y, x: y * (self.step / 3), _to_large, 8),
    "two with each other": (_of_two, _to_shares, 2),
    "three with each other": (_of_three, _to_shares, 2),
    "compared with another": (_against_another, _to_shares, 3),
    "two that are equal at first": (_two_alike, _to_equal, 3),
}


def _model(compute: Compute) -> Any:
    torch.manual_seed(0)
    attributes: dict[str, Callable[[], Any]] = {
        "beta": lambda: 0.01, "tau": lambda: 3.0, "twin": lambda: 0.9, "step": int, "drop": lambda: nn.Dropout(0.9),
        "config": lambda: Thing(rate=0.7, loss=Thing(weight=0.9)),
    }  # fmt: skip
    return Computes(compute, having(**attributes))


def _steps(model: Any, set_to: Callable[[Any, int], None]) -> list[Any]:
    return numbered_steps(model, set_to, STEPS, lambda model: (model.step, torch.get_rng_state().tolist()))


@pytest.mark.parametrize("case", CASES)
def test_one_capture_for_all_numbers(case: str, caplog: pytest.LogCaptureFixture) -> None:
    compute, set_to, captures = CASES[case]
    plain, planned = _model(compute), _model(compute)
    lowtide.rematerialize(planned, budget="100%", planner="greedy", dynamic=False)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        assert _steps(planned, set_to) == _steps(plain, set_to)
    assert 1 + caplog.text.count("is captured again") <= captures
    assert planned.forward.ran == STEPS or set_to is _to_large  # beyond what a tensor can bring
    with lowtide.checked(every=1):
        planned(rows()).backward()


def _nothing_follows(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * round(self.beta, 1) + y * int(self.beta * 10) + y * (self.beta // 0.1)


def _in_pieces(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (self.step // 4) + y.sin() * (self.step % 3)


def _in_steps(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Where another number close to it makes the same of it."""
    return y * max(0.1, (self.beta + 0.33) // 0.1 * 0.1)


def _asked_while_it_counts(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Whose trace fails by the one number, and not by the count."""
    self.step += 1
    return y * round(torch.tensor(self.beta).item(), 1)


def _close_to_nothing(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Where 1 less is rounded to 1 less than nothing, as the derivative of a power has it."""
    return y.abs().add(0.1) ** (self.beta**12) + y.abs().add(0.1) ** (-(self.tau**40) / 1e20)


def _alike_for_some(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Two that are the same in the calls that are captured."""
    return y - (-(self.beta % 0.2)) + y.square() * self.beta


def _as_a_size(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y[:, : self.step % 4 + 1].sum(1, keepdim=True) + F.interpolate(y[None], scale_factor=1 + self.beta)[0, :, :4]


def _of_several(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (self.beta * self.tau) + torch.tensor([self.beta, self.tau]).sum() * y


def _of_one_that_is_more(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (self.beta * self.tau) + y.sin() * round(self.tau * self.beta, 2) + y.cos() * (self.beta // self.twin)


def _kept_of_two(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.product = self.beta * self.tau
    self.step = self.step * self.step % 7 + 1
    return y * self.product * self.step


def _divided(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        return y * (self.beta / (self.step - 6))
    except ZeroDivisionError:
        return y


def _special(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.abs() ** (self.step - 4) + F.dropout(y, max(0.0, 0.1 * (self.step - 6)))


def _bare(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * vars(self)["beta"] + y.sin() * float(self.beta) + y.cos() * self.__dict__.get("tau")


def _asked_of_a_tensor(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * 2 if torch.tensor(self.beta) > 0.15 else y


def _asked_of_a_mask(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * 2 if (torch.full((4,), self.tau) < 2.2).any() else y


def _asked_of_integers(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(4)
    y = y * 3 if (numbers * self.beta).sum().item() > 1 else y
    return y + y[:, numbers * self.tau > 4.2].sum(1, keepdim=True)


class _Recurrent(nn.Module):
    """Of two results of its layers' backward pass PyTorch's fake kernel says that they are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.steps = nn.LSTM(8, 8, num_layers=3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.body(x)[0].square().mean() * min(1.0, self.steps / 4)


def test_a_number_beside_recurrent_layers() -> None:
    torch.manual_seed(0)
    plain, x = _Recurrent(), torch.randn(4, 2, 8)
    planned = copy.deepcopy(plain)
    lowtide.rematerialize(planned, (x,), budget="100%", planner="keep-all", on_capture_error="error")
    for _ in range(6):
        losses = [model(x) for model in (plain, planned)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert all(
        torch.equal(one.grad, two.grad) for one, two in zip(plain.parameters(), planned.parameters(), strict=True)
    )  # type: ignore[arg-type]
    assert len(lowtide.plans(planned)) == 2  # for either answer of the comparison


@pytest.mark.parametrize(
    "compute",
    [
        _asked_of_a_tensor,
        _asked_of_a_mask,
        _asked_of_integers,
        _nothing_follows,
        _in_pieces,
        _in_steps,
        _close_to_nothing,
        _asked_while_it_counts,
        _alike_for_some,
        _as_a_size,
        _of_several,
        _of_one_that_is_more,
        _kept_of_two,
        _divided,
        _special,
        _bare,
    ],
)
def test_numbers_of_which_less_is_known(compute: Compute) -> None:
    plain, planned = _model(compute), _model(compute)
    lowtide.rematerialize(planned, budget="100%", planner="greedy", dynamic=False)
    assert _steps(planned, _to_shares) == _steps(plain, _to_shares)


class _Augmented(nn.Module):
    """Computes with numbers that Python and NumPy draw; one draw decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = np.random.beta(0.4, 0.4)
        x = share * x + (1 - share) * x.flip(0)
        y = torch.tanh(self.linear(x * random.uniform(0.8, 1.2) + random.gauss(0, 0.1)))
        y = y * 2 if random.random() < 0.3 else y
        return (y / (1 - 0.5 * np.random.rand())).square().mean()


def test_drawn_numbers_that_are_computed_with(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(_Augmented)
    caplog.set_level(logging.INFO, "lowtide")
    for step in range(STEPS):
        states: list[Any] = []
        for model in (plain, planned):
            random.seed(step)
            np.random.seed(step)
            model.zero_grad()
            loss = model(rows())
            loss.backward()
            drawn = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
            states.append((loss.item(), model.linear.weight.grad.tolist(), drawn))
        assert states[0] == states[1]
    assert caplog.text.count("is captured again") <= 1
    assert planned.forward.parts is None and not planned.forward.is_online


def test_calls_that_wait_keep_their_numbers() -> None:
    """Two calls with other numbers before the backward pass, which reads them, and other gradients arriving."""

    class Two(Computes):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            y = torch.tanh(self.linear(x)) * self.beta
            return y.exp() * self.beta, y.square()

    plain, planned = plain_and_planned(lambda: Two(lambda self, y, x: y, having(beta=lambda: 0.5)))
    for step in range(8):
        for model in (plain, planned):
            model.zero_grad()
            results = []
            for call in range(1 if step < 3 else 2):
                model.beta = 0.1 + 0.1 * step + 0.03 * call
                results.append(model(rows() + call))
            if step >= 3:
                model.beta = 0.97
            results[0][step % 2].sum().backward()
            if step >= 3:
                (results[1][0].sum() + results[1][1].sum()).backward()
        assert torch.equal(*(model.linear.weight.grad for model in (plain, planned)))


class _Weighted(nn.Module):
    """Whose calls are given numbers: two that it computes with, one that it compares, and one that is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, weight: float, step: int = 0, *, tau: float = 1.0, rows: int = 2
    ) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * weight
        y = y * 2 if step > 5 else y
        return (y / tau).square().mean() + y[:rows].sum()


@pytest.mark.parametrize("sizes", [1, 2])
def test_numbers_among_arguments(sizes: int, caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(_Weighted, dynamic=False)
    caplog.set_level(logging.INFO, "lowtide")
    for step in range(STEPS):
        losses = []
        for model in (plain, planned):
            model.zero_grad()
            losses.append(model(rows(), 0.1 + step / 13, step, tau=3 * 0.9**step, rows=1 + step % sizes))
            losses[-1].backward()
        assert torch.equal(*losses)
        assert torch.equal(*(model.linear.weight.grad for model in (plain, planned)))
    assert caplog.text.count("planned _Weighted") <= 2 + 2 * sizes  # before anything has changed, and for steps after 5
    assert planned.forward.parts is None and not planned.forward.is_online
    with lowtide.checked(every=1):
        planned(rows(), 0.3, 9, tau=2.0).backward()


class _NowAndThen(nn.Module):
    """Whose calls read their numbers only where they are given something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beta, self.weights = nn.Linear(4, 4), 0.1, {"a": 0.3}

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh()
        return y if other is None else y * self.beta + other * self.weights["a"]


def test_numbers_that_some_calls_do_not_read(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(_NowAndThen, dynamic=False)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for step in range(STEPS):
            for model in (plain, planned):
                model.beta, model.weights["a"] = 0.1 * step, 1 / (step + 1)
            others = () if step % 2 else (rows() + 1,)
            expected, found = (model(rows(), *others) for model in (plain, planned))
            assert torch.equal(expected, found)
            found.sum().backward()
    assert caplog.text.count("is captured again") == 1


class _AsksForTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh()
        return y * weight if type(weight) is float else y.sin()


def test_an_argument_whose_class_is_asked_for() -> None:
    plain, planned = plain_and_planned(_AsksForTypes)
    for step in range(5):
        expected, found = (model(rows(), 0.1 * step) for model in (plain, planned))
        assert torch.equal(expected, found)
        found.sum().backward()


class _Wrapped(nn.Module):
    """Whose code names a function within a wrapper of PyTorch's, which asks for its class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.compiler.disable
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def forward(self, x: torch.Tensor, weight: float, other: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh()
        return (self.other(y) if other else y) * weight


def test_a_function_within_a_wrapper_of_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(_Wrapped)
    caplog.set_level(logging.INFO, "lowtide")
    for step in range(6):
        expected, found = (model(rows(), 0.1 * step) for model in (plain, planned))
        assert torch.equal(expected, found)
        found.sum().backward()
    assert sum("(capture" in message for message in caplog.messages) <= 4  # with sums' gradients apart


def test_arguments_that_wait_keep_their_numbers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, weight: float, step: int) -> Any:
            y = torch.tanh(self.linear(x)) * weight
            return (y.exp() if step % 2 else y.sin()) * weight, y.square()

    plain, planned = plain_and_planned(Two)
    for step in range(8):
        for model in (plain, planned):
            model.zero_grad()
            one, two = (model(rows() + call, 0.1 * (step + 1) + 0.03 * call, step + call) for call in range(2))
            one[step % 3 != 0].sum().backward()
            (two[0].sum() + two[1].sum()).backward()
        assert torch.equal(*(model.linear.weight.grad for model in (plain, planned)))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**30, True, None, 2])
def test_other_values_in_the_place_of_a_number(value: Any) -> None:
    plain, planned = plain_and_planned(_Weighted, dynamic=False)
    for weight in (0.5, 0.6, 0.7, value, 0.8):
        found = []
        for model in (plain, planned):
            model.zero_grad()
            try:
                model(rows(), weight).backward()
                found.append(repr(model.linear.weight.grad.tolist()))
            except (TypeError, RuntimeError, OverflowError) as error:
                found.append(type(error).__name__)
        assert found[0] == found[1]


class _Lengths(nn.Module):
    """Computes with a number of its own, one that it counts on, and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beta, self.step = nn.Linear(4, 4), 0.0, 0

    def forward(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        self.step += 1
        y = torch.tanh(self.linear(x)) * weight
        y = F.dropout(y, self.beta) + self.beta * torch.relu(y)
        return y.square().mean() * min(1.0, self.step / 9)


def test_a_family_of_lengths_for_all_numbers(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(_Lengths)
    caplog.set_level(logging.INFO, "lowtide")
    lengths = [3, 4, 5, 7, 9, 3, 12, 6, 8, 4, 11, 10, 13, 14]
    for step, length in enumerate(lengths):
        losses = []
        for model in (plain, planned):
            torch.manual_seed(step)
            model.beta = 0.02 * (step + 1)
            model.zero_grad()
            x = torch.randn(length, 4, generator=torch.Generator().manual_seed(step))
            losses.append(model(x, 0.3 + 0.01 * step))
            losses[-1].backward()
        assert torch.equal(*losses)
        assert torch.equal(*(model.linear.weight.grad for model in (plain, planned)))
    assert planned.step == len(lengths)
    assert "captured anew for each shape" not in caplog.text
    assert (
        caplog.text.count("(capture ") <= 6
    )  # two by themselves and their family, before and after the count is enough


class _Mixed(nn.Module):
    """Counts on a number, and draws one that it computes with, in a way that makes it a constant where ``rounded``. Its code
    names what NumPy has a function of, too."""

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self.linear, self.step, self.rounded = nn.Linear(4, 4), 0, rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        share = np.random.rand()
        share = round(share, 1) if self.rounded else share
        return torch.tanh(self.linear(x) * share).mean()


@pytest.mark.parametrize("rounded", [False, True])
def test_a_count_beside_drawn_numbers(rounded: bool) -> None:
    """What makes the drawn numbers constants leaves the count as it is."""
    plain, planned = plain_and_planned(lambda: _Mixed(rounded))
    for step in range(4):
        for model in (plain, planned):
            np.random.seed(step)
            model.zero_grad()
            model(rows()).backward()
        assert torch.equal(*(model.linear.weight.grad for model in (plain, planned)))
        assert planned.step == plain.step == step + 1

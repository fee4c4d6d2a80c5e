"""``lowtide.checked`` finds what no guard sees, and disturbs nothing."""

from __future__ import annotations

import functools
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


class _Switch:
    """How a signal is handled, which no guard sees."""

    def read(self) -> float:
        return 3.0 if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN else 1.0

    def turn_on(self) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class _Timed(nn.Module):
    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.hidden.read()).sum()


def _planned(model: nn.Module) -> nn.Module:
    return lowtide.rematerialize(model, (torch.randn(3, 4),), budget="100%", planner="keep-all")


def test_a_stale_plan_is_found() -> None:
    switch = _Switch()
    model = _planned(_Timed(switch))
    x = torch.randn(3, 4)
    with lowtide.checked(every=1):
        model(x).backward()
    switch.turn_on()
    model(x)  # nobody notices
    with (
        pytest.raises(lowtide.ExecutionError, match=r"_Timed is about to run a stale plan: operator \d+, aten.mul"),
        lowtide.checked(every=1),
    ):
        model(x)


def test_every_nth_call_is_checked() -> None:
    switch = _Switch()
    model = _planned(_Timed(switch))
    switch.turn_on()
    x = torch.randn(3, 4)
    with lowtide.checked(every=3):
        model(x), model(x)
        with pytest.raises(lowtide.ExecutionError, match="stale"):
            model(x)
        with lowtide.checked(every=2):
            model(x)
            with pytest.raises(lowtide.ExecutionError, match="stale"):
                model(x)
        model(x), model(x)
    model(x)


def test_other_threads_are_left_alone() -> None:
    switch = _Switch()
    model = _planned(_Timed(switch))
    switch.turn_on()
    found: list[torch.Tensor] = []
    with lowtide.checked(every=1):
        thread = threading.Thread(target=lambda: found.append(model(torch.randn(3, 4))))
        thread.start()
        thread.join()
    assert len(found) == 1


class _Ordinary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 4)
        )
        self.hidden = torch.zeros(4)
        self.longest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x) * (2 if random.random() < 2 else 1)
        self.hidden = y.detach().mean(0) + self.hidden
        self.longest = max(self.longest, len(x))
        return (y + self.hidden).square().mean()


def _trained(checking: bool) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    model = _Ordinary()
    lowtide.rematerialize(model, (torch.randn(6, 4),), budget="100%", planner="keep-all")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Any] = []
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(6, 4)
        if checking:
            with lowtide.checked(every=1):
                loss = model(x)
        else:
            loss = model(x)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    numbers = torch.tensor([random.random(), model.longest])
    return [*found, *model.state_dict().values(), model.hidden, torch.get_rng_state(), numbers]


def test_checks_change_nothing() -> None:
    assert all(map(torch.equal, _trained(True), _trained(False)))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_bad_intervals(every: Any) -> None:
    with pytest.raises(lowtide.PlanError, match=r"every=.* must be a positive integer: every=1"):
        lowtide.checked(every=every)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("lengths", [(6, 6), (6, 8, 12, 10)])
def test_batches_that_are_cut_out_of_one_tensor(dynamic: bool, lengths: tuple[int, ...]) -> None:
    """They begin elsewhere each time, and programs of other sizes have other names: neither makes another program."""
    data = torch.randn(32, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4))
    lowtide.rematerialize(model, (torch.randn(6, 4),), budget="100%", planner="keep-all", dynamic=dynamic)
    for index, length in enumerate(lengths):
        with lowtide.checked(every=1):
            model(data[2 * index : 2 * index + length]).square().mean().backward()


class _Auxiliary(nn.Module):
    """Leaves a term of the loss in an attribute, and in one that it also reads what it left there."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.reads, self.terms, self.last = reads, dict[str, Any](), torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            layer.term = x.square().mean()
        self.terms["sum"] = x.sum()
        if self.reads:
            x = x + self.last.detach()
            self.last = x.mean(0)
        return x.mean()


@pytest.mark.parametrize("reads", [False, True])
def test_terms_of_the_loss_that_are_left_in_attributes(reads: bool) -> None:
    """The second call finds tensors there that require gradients, and does not read them."""
    model = _planned(_Auxiliary(reads))
    with lowtide.checked(every=1):
        for _ in range(3):
            loss = model(torch.randn(3, 4))
            (loss + sum(layer.term for layer in model.layers) + model.terms["sum"]).backward()


class _Remembered:
    @functools.cached_property
    def scale(self) -> float:
        return 2.0


class _Remembering(nn.Module):
    """Its first call keeps a value that it computes, and two in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.of, self.sizes = nn.Linear(4, 4), _Remembered(), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sizes:
            self.sizes[:] = x.shape
        return (self.linear(x) * self.of.scale * self.sizes[0]).sum()


def test_values_that_the_first_call_keeps() -> None:
    model = _planned(_Remembering())
    with lowtide.checked(every=1):
        for _ in range(3):
            model(torch.randn(3, 4)).backward()


def test_inputs_that_share_their_memory() -> None:
    """Parameters that are made views of one tensor while the model trains, and arguments that are cut out of one."""
    model = nn.Bilinear(4, 4, 4)
    lowtide.rematerialize(model, (torch.randn(3, 4), torch.randn(3, 4)), budget="100%", planner="keep-all")
    with lowtide.checked(every=1):
        model(torch.randn(3, 4), torch.randn(3, 4)).sum().backward()
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
        model(*torch.randn(6, 4).chunk(2)).sum().backward()


class _Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in "abcd":
            x = torch.tanh(self.linear(x))
            setattr(self, name, x)
        return x.mean()


def test_attributes_stay_in_their_order_where_gradients_come_unexpectedly() -> None:
    """The backward pass is captured with the attributes of before, and puts those of the call back."""
    model = _planned(_Noting())
    with lowtide.checked(every=1):
        for _ in range(3):
            (model(torch.randn(3, 4)) + model.b.sum() + model.d.sum()).backward()
            assert [name for name in vars(model) if len(name) == 1] == [*"abcd"]

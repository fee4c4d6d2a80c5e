"""Between two steps tensors come to share memory that the program writes into, or to be views of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.fuzz.changed import rows


class Inner(nn.Module):
    """Adds to its buffer, reads a second one, and writes into its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.kept = [torch.zeros(4)]

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        self.total.add_(1.0)
        y.mul_(2.0)
        seen = x + y + self.other + self.kept[0] + z.real
        return (torch.tanh(self.linear(seen)) + seen).square().sum()


class Outer(nn.Module):
    """Runs in parts where its part is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(*args)
        return loss


Change = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def _buffers(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.other = inner.total[:]
    return x, y, z


def _same_buffer(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.other = inner.total
    return x, y, z


def _data(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.other.data = inner.total.data
    return x, y, z


def _kept(inner: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner.kept[0] = inner.total[:]
    return x, y, z


CHANGES: dict[str, Change] = {
    "views of one argument": lambda inner, x, y, z: (x, x[:], z),
    "rows of one argument": lambda inner, x, y, z: (lambda both: (both[:3], both[1:], z))(torch.cat([x, y])[:4]),
    "one argument twice": lambda inner, x, y, z: (x, x, z),
    "a buffer as an argument": lambda inner, x, y, z: (inner.total.expand(3, 4), y, z),
    "a buffer that is a view of another": _buffers,
    "one buffer twice": _same_buffer,
    "one memory of two buffers": _data,
    "a view of a buffer in a list": _kept,
    "a conjugated argument": lambda inner, x, y, z: (x, y, z.conj()),
    "a negated argument": lambda inner, x, y, z: (z.conj().imag, y, z),
}


def _steps(change: Change, planned: bool) -> list[Any]:
    torch.manual_seed(0)
    model = Outer()
    if planned:
        lowtide.rematerialize(model, budget="100%", planner="keep-all")
    found = []
    for step in range(5):
        x = rows() + step
        args: tuple[torch.Tensor, ...] = (x, rows() * 3, torch.complex(x.cos(), x.sin()))
        args = change(model.inner, *args) if step > 1 else args
        model.zero_grad()
        loss = model(*args)
        loss.backward()
        found += [loss.detach(), model.inner.linear.weight.grad, *(one.clone() for one in (*args, *model.buffers()))]
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_memory_between_steps(name: str) -> None:
    expected, found = (_steps(CHANGES[name], planned) for planned in (False, True))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


class _Scaling(nn.Module):
    """Computes with a tensor in a plain attribute, whose value its backward pass needs if it ``multiplies`` with it."""

    def __init__(self, multiplies: bool) -> None:
        super().__init__()
        self.linear, self.table, self.multiplies = nn.Linear(4, 4), torch.full((4,), 2.0), multiplies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.tanh(y * self.table if self.multiplies else y + self.table).sum()


WRITES: dict[str, Callable[[Any], Any]] = {
    "written": lambda model: model.table.fill_(3.0),
    "given other data": lambda model: setattr(model.table, "data", torch.full((4,), 3.0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_constant_that_changes_between_the_passes(write: str) -> None:
    """Eager refuses the first, and would go on with the memory that was there in the second; what does not need it goes on."""
    for multiplies in (True, False):
        model = _Scaling(multiplies)
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all")
        model(rows()).backward()
        expected, model.linear.weight.grad = model.linear.weight.grad, None
        loss = model(rows())
        WRITES[write](model)
        if multiplies:
            with pytest.raises(lowtide.ExecutionError, match="a tensor that the model holds was modified in place"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(model.linear.weight.grad, expected)
        model.zero_grad()
        model(rows()).backward()
        found, plain = model.linear.weight.grad, lowtide.restore(model)
        plain.zero_grad()
        plain(rows()).backward()
        assert torch.equal(plain.linear.weight.grad, found)


class _Backward(torch.autograd.Function):
    """Scales gradients by a tensor that its forward pass does not read."""

    table = torch.ones(4)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * _Backward.table


class _ScalingGradients(_Scaling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Backward.apply(self.linear(x)).sum()  # type: ignore[no-any-return,no-untyped-call]


def test_a_constant_of_the_backward_pass_alone_is_read_as_it_is_then() -> None:
    model = _ScalingGradients(False)
    lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all")
    found = []
    for value in (1.0, 2.0):
        model.zero_grad()
        loss = model(rows())
        _Backward.table.fill_(value)
        loss.backward()
        found.append(model.linear.weight.grad * 2 / value)
    _Backward.table.fill_(1.0)
    assert torch.equal(*found)

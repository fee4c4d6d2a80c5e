"""A planned model is changed between two steps: the next one is as in eager, or refused, in any case not stale."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import lowtide
from tests.support.wide import is_wide


class Thing:
    """An object of the user's."""

    number: float = 1.0

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Reader(nn.Module):
    """Scales by a number that is read from a state."""

    def __init__(self, state: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = state
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.linear(x)) * float(self.read(self.state))).sum()


class Computes(nn.Module):
    """Does ``compute(self, y, x, ...)`` to what its layer makes; ``prepare(self)`` gives it what that needs."""

    def __init__(
        self, compute: Callable[..., torch.Tensor], prepare: Callable[[Any], Any] = lambda module: None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = compute
        prepare(self)

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return self.compute(self, torch.tanh(self.linear(x)), x, *others).sum()


class Turned(torch.autograd.Function):
    """Whose backward pass reads the ``number`` of an ``owner``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Any) -> torch.Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return -gradient * ctx.owner.number, None


class Reversed(torch.autograd.Function):
    """Turns gradients round and scales them by a number, of which its forward pass takes none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient.neg() * ctx.weight, None


def part_of(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """For ``Computes``: what its submodule ``part`` makes."""
    made: torch.Tensor = self.part(y)
    return made


def having(**attributes: Callable[[], Any]) -> Callable[[Any], None]:
    """For ``Computes``: it has such attributes, made for each module anew."""

    def prepare(module: Any) -> None:
        for name, make in attributes.items():
            setattr(module, name, make())

    return prepare


def rows() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def set_attribute(name: str, value: Any) -> Callable[[Any], None]:
    """A change of a state."""
    return lambda state: setattr(state, name, value)


def set_item(key: Any, value: Any) -> Callable[[Any], None]:
    """A change of a state."""
    return lambda state: operator.setitem(state, key, value)


def step(model: nn.Module, args: Sequence[Any], plain: bool) -> list[torch.Tensor]:
    """A step of the model, or of the same model without its plan."""
    torch.manual_seed(1)
    model.zero_grad()
    planned = model.__dict__.pop("forward") if plain else None
    if plain and planned.had_instance_forward:
        model.__dict__["forward"] = planned.original_forward
    try:
        loss = model(*args)
    finally:
        if plain:
            model.__dict__["forward"] = planned
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def follows(
    model: nn.Module,
    change: Callable[[Any], Any],
    args: Sequence[Any] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """Plan, step, change, and step again: as in eager, and in a wide run also as a capture anew finds. ``change`` may return
    other arguments; ``around`` the later steps."""
    args = (rows(),) if args is None else args
    lowtide.rematerialize(model, tuple(args), budget="100%", planner="keep-all")
    before = step(model, args, plain=False)
    assert same(before, step(model, args, plain=True)), "wrong before anything has changed"
    changed = change(model)
    args = changed if isinstance(changed, tuple) else args
    with around():
        expected = step(model, args, plain=True)
        assert not same(before, expected), "the change changes nothing: the case is vacuous"
        assert same(step(model, args, plain=False), expected), "a stale plan ran"
        if is_wide():
            with lowtide.checked(every=1):
                assert same(step(model, args, plain=False), expected)


def numbered_steps(model: Any, change: Callable[[Any, int], None], count: int, left: Callable[[Any], Any]) -> list[Any]:
    """What so many steps compute, and what they have ``left``; each begins with a ``change`` of the model's numbers."""
    states = []
    for step in range(count):
        change(model, step)
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(rows() + step)
        loss.backward()
        states.append((loss.item(), model.linear.weight.grad.tolist(), left(model)))
    return states


def steps(make: Callable[[], nn.Module], planned: bool, count: int = 4) -> list[list[torch.Tensor]]:
    """Some steps in a row of a model that is made anew, without clearing gradients in between."""
    torch.manual_seed(0)
    model = make()
    if planned:
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all")
    found = []
    for _ in range(count):
        torch.manual_seed(1)
        loss = model(rows())
        loss.backward()
        found.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return found

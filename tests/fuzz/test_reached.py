# ruff: noqa: E501
"""What arguments, hooks and operators of tensors lead to is changed between two steps: the next one is as in eager."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.fuzz.changed import Computes, Thing, follows, rows


class Given:
    number = 1.0


_NUMBER: Any = 1.0
_MODULE: Any = types.ModuleType("a_module_as_an_argument")


def scored(y: torch.Tensor) -> torch.Tensor:
    return y * _NUMBER


@pytest.fixture
def _as_before() -> Iterator[None]:
    Given.number = _MODULE.number = 1.0  # type: ignore[attr-defined]
    yield
    Given.number = 1.0
    globals().update(_NUMBER=1.0)


# name: an argument, what is computed with it, and a change that the argument itself does not show.
REACHED: dict[str, tuple[Any, Callable[[torch.Tensor, Any], Any], Callable[[], Any]]] = {
    "attribute of a class": (Given, lambda y, v: y * v.number, lambda: setattr(Given, "number", 2.0)),
    "attribute of a class in a list": ([Given], lambda y, v: y * v[0].number, lambda: setattr(Given, "number", 2.0)),
    "variable of a module": (_MODULE, lambda y, v: y * v.number, lambda: setattr(_MODULE, "number", 2.0)),
    "global variable of a function in a partial": (functools.partial(scored), lambda y, v: v(y), lambda: globals().update(_NUMBER=2.0)),
}  # fmt: skip


def test_a_module_in_an_object_among_the_arguments() -> None:
    held = Thing(inner=Thing(part=nn.Dropout(0.5)))
    follows(Computes(lambda s, y, x, v: v.inner.part(y)), lambda model: held.inner.part.eval() and None, (rows(), held))


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", REACHED)
def test_what_an_argument_leads_to(name: str) -> None:
    argument, compute, change = REACHED[name]
    follows(Computes(lambda s, y, x, v: compute(y, v)), lambda model: change(), (rows(), argument))


def test_hooks_in_another_order() -> None:
    def prepare(module: Any) -> None:
        module.linear.register_forward_hook(lambda m, a, o: o * 2)
        module.linear.register_forward_hook(lambda m, a, o: o + 1)

    def change(model: Any) -> None:
        hooks = model.linear._forward_hooks
        hooks.move_to_end(next(iter(hooks)))

    follows(Computes(lambda s, y, x: y, prepare), change)


@pytest.mark.parametrize("name", ["__mul__", "__rsub__", "__matmul__"])
def test_operators_of_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(torch.Tensor, name)
    model = Computes(lambda s, y, x: (1 - y) @ torch.eye(4) * 3)
    follows(model, lambda m: monkeypatch.setattr(torch.Tensor, name, lambda one, other: before(one, other).add(1)))

"""More of what a model is made of, and of what is around it, changed between two steps (see ``test_module_changes``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.capture.trace.patches import replaced
from tests.fuzz.changed import Computes, follows, having, part_of


class Doubled:
    """Reads past what its owner has no attribute for."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__.get("number", 1.0) * 2


def _numbered(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * sum(value for name, value in vars(self).items() if name.startswith("number_"))


_ONE = having(number_1=lambda: 1.0)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "another attribute among all of the model's": (
        lambda: Computes(_numbered, _ONE),
        lambda m: setattr(m, "number_2", 2.0),
    ),
    "an attribute less among all of the model's": (
        lambda: Computes(_numbered, having(number_1=lambda: 1.0, number_2=lambda: 1.0)),
        lambda m: delattr(m, "number_2"),
    ),
    "another dictionary of the model's attributes": (
        lambda: Computes(lambda s, y, x: y * s.number_1, _ONE),
        lambda m: setattr(m, "__dict__", {**vars(m), "number_1": 2.0}),
    ),
    "an attribute behind a descriptor of the model's": (
        lambda: type("Described", (Computes,), {"twice": Doubled()})(lambda s, y, x: y * s.twice),
        lambda m: setattr(m, "number", 2.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_changes_between_steps(name: str) -> None:
    make, change = CASES[name]
    follows(make(), change)


def _called(before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *args: before(module, *args) * (2 if isinstance(module, nn.Tanh) else 1)


AROUND: dict[str, tuple[Any, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "function that a layer calls": (
        lambda s, y, x: y,
        lambda: replaced(F, "linear", lambda *args, before=F.linear: before(*args) * 2),
    ),
    "function that a function calls": (
        lambda s, y, x: F.multi_head_attention_forward(*_attention(s.linear, y))[0],
        lambda: replaced(F, "softmax", lambda *args, before=F.softmax, **more: before(*args, **more) * 2),
    ),
    "how modules are called": (part_of, lambda: replaced(nn.Module, "_call_impl", _called(nn.Module._call_impl))),
}


def _attention(layer: nn.Linear, y: torch.Tensor) -> tuple[Any, ...]:
    weights = torch.cat([layer.weight] * 3)
    return y, y, y, 4, 2, weights, None, None, None, False, 0.0, layer.weight, None


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around(name: str) -> None:
    compute, around = AROUND[name]
    follows(Computes(compute, having(part=nn.Tanh)), lambda m: None, around=around)

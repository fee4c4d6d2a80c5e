"""Steps that a test writes itself, of a plain model and of a rematerialized one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

import lowtide
from tests.support.records import equal
from tests.support.training import make

T = TypeVar("T", bound=nn.Module)


def plain_and_planned(build: Callable[[], T], **options: Any) -> tuple[T, T]:
    """A model, and a copy of it that is rematerialized, with ``options``: by default within what it takes, so that nothing is
    infeasible, and by the quickest planner."""
    torch.manual_seed(0)
    plain = build()
    planned = copy.deepcopy(plain)
    lowtide.rematerialize(planned, **{"budget": "100%", "planner": "greedy", **options})
    return plain, planned


def assert_as_eager(
    model_factory: Callable[[], nn.Module], step: Callable[[Any, int], Any], steps: int = 4
) -> nn.Module:
    """Run ``step(model, number)`` with both, and compare what each step returns and leaves to the bit: gradients, parameters,
    buffers, and the generator's state. Returns the rematerialized model."""
    plain, planned = make(model_factory), make(model_factory)
    lowtide.rematerialize(planned, budget="100%", planner="keep-all")
    assert_same_steps(plain, planned, step, steps)
    return planned


def assert_same_steps(plain: nn.Module, planned: nn.Module, step: Callable[[Any, int], Any], steps: int) -> None:
    """The same for two models that there are."""
    expected, found = ([_after(model, step, number) for number in range(steps)] for model in (plain, planned))
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert ours[1] == theirs[1], f"step {number}: what is no tensor"
        assert len(ours[0]) == len(theirs[0])
        assert all(map(equal, ours[0], theirs[0])), f"step {number}"


def _after(model: nn.Module, step: Callable[[Any, int], Any], number: int) -> tuple[list[torch.Tensor], list[Any]]:
    torch.manual_seed(number)
    returned = step(model, number)
    gradients = [each.grad for each in model.parameters()]
    leaves = pytree.tree_leaves(
        (returned, gradients, model.state_dict(), torch.get_rng_state()), is_leaf=lambda x: x is None
    )
    tensors = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, [None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]

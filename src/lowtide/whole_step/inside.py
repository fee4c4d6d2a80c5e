"""Modelled programs in which an optimizer updates parameters inside the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtide.program import Program
from lowtide.program.optimizer_state import One, Optimizer, each_of, optimizer_like, parameters_of, state_sizes
from lowtide.program.updates import StateMoves, with_updates
from lowtide.runtime.updates.moving_states import movable_bytes
from lowtide.runtime.updates.optimizer_step import plain_step


class _OnPaper:
    """An operator that never runs."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "lowtide"

    def __call__(self, *_: Any) -> Any:
        raise NotImplementedError("a program on paper does not run")


def updated_inside(program: Program, model: nn.Module, optimizer: Optimizer, *, moving: bool) -> tuple[Program, int]:
    """``program`` with an update of each parameter of ``model``, as ``rematerialize(optimizer=)`` makes them. Also
    returns the bytes of states that lie elsewhere between updates, 0 unless ``moving``. Optimizers whose updates need
    all gradients are left out."""
    steps: dict[int, _OnPaper] = {}
    moves: dict[int, StateMoves] = {}
    for one in each_of(optimizer):
        trained = _trained(one, model)
        if not trained or plain_step(optimizer_like(one, next(iter(trained.values())))) is None:
            continue
        steps |= dict.fromkeys(trained, _OnPaper("optimizer"))
        sizes = {at: movable_bytes(state_sizes(one, tensor), tensor.device) for at, tensor in trained.items() if moving}
        fetch, store = _OnPaper("fetch_state"), _OnPaper("store_state")
        moves |= {at: StateMoves(fetch, store, size) for at, size in sizes.items() if size}
    if not steps:
        return program, 0
    changed = with_updates(program, steps, moves)
    return changed, sum(moves[position].bytes for position in changed.updated if position in moves)


def _trained(optimizer: One, model: nn.Module) -> dict[int, Tensor]:
    """The parameters of ``model`` that the optimizer trains, by position."""
    known = set(map(id, parameters_of(optimizer, model)))
    return {at: one for at, one in enumerate(model.parameters()) if one.requires_grad and id(one) in known}

"""Collect the optimizers of a planned model, and what of them may lie in a second memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from lowtide.errors import PlanError
from lowtide.program.optimizer_state import each_of
from lowtide.runtime.updates.moving_gradients import MovingGradients
from lowtide.runtime.updates.moving_states import MovingStates
from lowtide.runtime.updates.of_optimizer import OptimizerUpdates
from lowtide.runtime.updates.optimizer import UpdatingOptimizer
from lowtide.runtime.updates.optimizer_step import plain_step


def of_model(
    optimizer: Any, model: nn.Module, memory: str | None = None, *, moves_states: bool = False, keeps: bool = False
) -> UpdatingOptimizer:
    """The updates of one ``optimizer`` or several. ``memory``: the name of a second memory, for states if
    ``moves_states``, and for gradients if it ``keeps`` them until its step. Raises ``PlanError`` if something is not an
    optimizer or not this model's, or if two optimizers share a parameter."""
    given = _checked(optimizer, model)
    name, parameters = type(model).__name__, [*model.parameters()]
    # On accelerators, clip_grad_norm_ computes all norms in one kernel, which may round differently from one by one.
    sends = memory is not None and keeps and all(one.device.type == "cpu" for one in parameters)
    sends = sends and any(plain_step(one) is not None for one in given)
    made = []
    for one in given:
        moves = memory is not None and plain_step(one) is not None and (moves_states or sends)
        states = MovingStates(one, memory, parameters, movable=moves_states) if moves and memory is not None else None
        made.append(OptimizerUpdates(one, name, states))
    gradients = MovingGradients(memory, parameters) if sends and memory is not None else None
    return UpdatingOptimizer(made, name, gradients, keeps)


def _checked(optimizer: Any, model: nn.Module) -> list[Optimizer]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    had = Counter[int]()
    given = list[Optimizer]()
    for one in each_of(optimizer):
        if not isinstance(one, Optimizer):
            raise PlanError(
                f"optimizer= takes a torch.optim.Optimizer, or a sequence of them, not {type(one).__name__}; of a wrapper pass "
                "what is inside."
            )
        known = {id(parameter) for group in one.param_groups for parameter in group["params"]}
        if known.isdisjoint(names):
            raise PlanError(
                f"the optimizer {type(one).__name__} has none of the model's parameters; make it from model.parameters() of "
                "this model, on its device."
            )
        had.update(known)
        given.append(one)
    twice = [names.get(key, "of another model") for key, count in had.items() if count > 1]
    if twice:
        raise PlanError(
            f"two of the optimizers have the same parameter ({twice[0]}), {len(twice)} in all: each is to be updated by one."
        )
    return given

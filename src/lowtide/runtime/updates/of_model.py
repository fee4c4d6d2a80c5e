"""The optimizer of a model that is planned, with what of it may lie in a second memory."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from lowtide.errors import PlanError
from lowtide.runtime.updates.moving_gradients import MovingGradients
from lowtide.runtime.updates.moving_states import MovingStates
from lowtide.runtime.updates.optimizer import UpdatingOptimizer
from lowtide.runtime.updates.optimizer_step import plain_step


def of_model(
    optimizer: Any, model: nn.Module, memory: str | None = None, *, moves_states: bool = False, keeps: bool = False
) -> UpdatingOptimizer:
    """``memory``: the name of a second memory that states may lie in, where it ``moves_states``, and gradients, where it
    ``keeps`` them until its step. Raises ``PlanError`` for what is no optimizer, or not that of the model."""
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"optimizer= takes a torch.optim.Optimizer, not {type(optimizer).__name__}; of a wrapper pass what is inside."
        )
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [*model.parameters()]
    if not any(id(parameter) in known for parameter in parameters):
        raise PlanError(
            "the optimizer has none of the model's parameters; make it from model.parameters() of this model, on its device."
        )
    name = type(model).__name__
    # On accelerators clip_grad_norm_ takes the norms of all by one kernel, which may round otherwise than one by one.
    sends = memory is not None and keeps and all(one.device.type == "cpu" for one in parameters)
    if memory is None or plain_step(optimizer) is None or not (moves_states or sends):
        return UpdatingOptimizer(optimizer, name, keeps=keeps)
    states = MovingStates(optimizer, memory, parameters, movable=moves_states)
    gradients = MovingGradients(memory, parameters) if sends else None
    return UpdatingOptimizer(optimizer, name, states, gradients, keeps)

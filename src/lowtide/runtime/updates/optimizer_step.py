"""One step of an optimizer for one parameter: the optimizer's own ``step``, and the operator that runs it in a
program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach

_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_PER_PARAMETER: tuple[type[Optimizer], ...] = tuple(getattr(optim, name) for name in _NAMES if hasattr(optim, name))
_LATE_STEP = 1000.0  # by then, optimizers with a special start (RAdam) use their final memory


class ParameterStep:
    """The operator that calls ``update`` for a parameter in a ``group`` of ``optimizer``. Its name contains the
    optimizer and the group's values."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], update: Callable[..., Any]) -> None:
        self.optimizer, self._update = optimizer, update
        self._group = options_of(group)
        kind = type(optimizer)
        self._first: Any = next(iter(group["params"]), None)
        values = ",".join(f"{key}={_kind(value)}" for key, value in sorted(self._group.items()))
        self.__name__ = "optimizer"
        self.__module__, self.__qualname__ = kind.__module__, f"{kind.__qualname__}{{{values}}}"

    def __call__(self, *read: Any) -> Any:
        return self._update(*read)

    def rehearsal(self) -> Callable[..., Any]:
        """The same operator for other tensors, with its own state as after many steps; for measuring."""
        optimizer, state = self.optimizer, defaultdict[Any, dict[str, Any]](dict)
        first = optimizer.state.get(self._first, {}) if isinstance(optimizer, optim.Adagrad) else {}

        def step(parameter: torch.Tensor, gradient: torch.Tensor, fetched: Any = None) -> Any:
            if parameter not in state:
                made = (
                    (key, torch.zeros_like(parameter) if value.dim() else value.clone()) for key, value in first.items()
                )
                state[parameter] = dict(made)
            parameter.grad = gradient
            try:
                step_for(optimizer, self._group, parameter, state)
            finally:
                parameter.grad = None
            count = state[parameter].get("step")
            if isinstance(count, torch.Tensor):
                count.fill_(_LATE_STEP)
            elif count is not None:
                state[parameter]["step"] = int(_LATE_STEP)
            return fetched

        return step


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def values_of(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group for comparison; tensors by id and version."""
    return {key: (id(v), v._version) if isinstance(v, torch.Tensor) else v for key, v in options_of(group).items()}


def step_for(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, state: Any) -> None:
    """Run the optimizer's own step for one parameter, with the values of ``group``."""
    step = plain_step(optimizer)
    assert step is not None
    one = object.__new__(type(optimizer))
    own = {**group, "params": [parameter]}
    if own.get("foreach") is None and not own.get("fused") and "foreach" in own and parameter.device.type != "cpu":
        # Use the choice for the whole group: a single parameter might get another kernel.
        together = _default_to_fused_or_foreach(list(group.get("params", ())), False, use_fused=False)[1]
        own["foreach"] = None if together else False
    one.__dict__.update(optimizer.__dict__, param_groups=[own], state=state)
    step(one)


def order_state(optimizer: Optimizer, known: Collection[int]) -> None:
    """Sort states that are not ``known`` by the order of parameters, as one step for all parameters would create
    them."""
    state = optimizer.state
    if len(state) == len(known):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in state and id(parameter) not in known:
                state[parameter] = state.pop(parameter)


def plain_step(optimizer: Optimizer) -> Callable[[Any], Any] | None:
    """The step of the class without hooks, if the class treats every parameter by itself; else ``None``."""
    kind = type(optimizer)
    step = getattr(kind.step, "__wrapped__", None)
    for known in _PER_PARAMETER:
        if isinstance(optimizer, known) and getattr(kind, "_init_group", None) is getattr(known, "_init_group", None):
            theirs = getattr(known.step, "__wrapped__", known.step)
            if step is theirs or getattr(step, "__wrapped__", None) is theirs or kind is known:
                return step
    return None


def _kind(value: Any) -> str:
    """A text for a value of a group, as far as it may affect the cost of an update."""
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_kind, value)) + ")"
    if isinstance(value, torch.Tensor):
        return f"tensor@{value.device.type}"
    if isinstance(value, float):
        return "float" if value else "0"
    return str(value)

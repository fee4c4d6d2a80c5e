"""The state that an optimizer keeps for a model, found by letting it take a step on tensors without memory."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import PlanError
from lowtide.program.distributed.local import local_of
from lowtide.program.sizes import held_bytes

One = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str
Optimizer = One | Sequence[torch.optim.Optimizer]
Copies = dict[Tensor, Tensor]
Make = Callable[[Copies], torch.optim.Optimizer]


def named(optimizer: str) -> type[torch.optim.Optimizer]:
    """The class of ``torch.optim`` with this name, in any case. Raises ``PlanError`` if there is none."""
    classes = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if optimizer.lower() not in classes:
        raise PlanError(f"torch.optim has no optimizer {optimizer!r}; it has {', '.join(sorted(classes))}.")
    return classes[optimizer.lower()]


def each_of(optimizer: Optimizer) -> list[One]:
    """The optimizers of a sequence, or the single one. Raises ``PlanError`` for an empty sequence."""
    if not isinstance(optimizer, (list, tuple)):
        return [optimizer]  # type: ignore[list-item]
    if not optimizer:
        raise PlanError("optimizer= is an empty sequence; give the optimizers of the model, or leave it out.")
    return [*optimizer]


def optimizer_state_bytes(optimizer: Optimizer, model: nn.Module) -> tuple[str, int]:
    """The optimizer's name, and the bytes of its state after a step for all parameters of ``model`` that train.

    ``optimizer``: an optimizer of the model's parameters, which is left as it is, or a sequence of them; a function (a
    class, say) that makes one from a list of parameters; or the name of a class of ``torch.optim``. It steps on the
    meta device or, if it needs values, one parameter at a time on the CPU, with zeros. Raises ``PlanError`` if neither
    works.
    """
    found = [_state_bytes(one, model) for one in each_of(optimizer)]
    return " and ".join(name for name, _ in found), sum(size for _, size in found)


def _state_bytes(optimizer: One, model: nn.Module) -> tuple[str, int]:
    name, make = _maker(optimizer)
    given = parameters_of(optimizer, model)
    if not any(parameter.requires_grad for parameter in given):
        return name, 0
    with contextlib.suppress(Exception):  # whatever an optimizer raises where there are no values
        return name, held_bytes(_stepped(make, given, "meta"))
    try:
        return name, sum(held_bytes(_stepped(make, [parameter], "cpu")) for parameter in given)
    except Exception as error:
        raise PlanError(f"the state of {name} could not be found out: {type(error).__name__}: {error}.") from error


def parameters_of(optimizer: One, model: nn.Module) -> list[Tensor]:
    """The parameters of the optimizer; all parameters of ``model`` if it does not exist yet."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [*model.parameters()]


def state_sizes(optimizer: One, parameter: Tensor) -> list[int]:
    """The bytes of each tensor that ``optimizer`` keeps for ``parameter`` after a step; empty if they cannot be
    found."""
    _, make = _maker(optimizer)
    for device in ("meta", "cpu"):
        with contextlib.suppress(Exception):  # whatever an optimizer raises where there are no values
            return [tensor.nbytes for tensor in _stepped(make, [parameter], device)]
    return []


def optimizer_like(optimizer: One, parameter: Tensor) -> torch.optim.Optimizer:
    """An optimizer like ``optimizer`` (or made by it) for a copy of ``parameter`` on the meta device."""
    return _maker(optimizer)[1]({parameter: nn.Parameter(torch.empty_like(local_of(parameter), device="meta"))})


def for_parameters(optimizer: Optimizer, others: Copies) -> Optimizer:
    """An optimizer like this one, or like each of a sequence, for the ``others`` that its parameters have become. A
    function that makes optimizers is returned as it is."""
    if isinstance(optimizer, (list, tuple)):
        return [_like(one, others) for one in optimizer]
    return _like(optimizer, others) if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _maker(optimizer: One) -> tuple[str, Make]:
    """The optimizer's name, and a function that makes one like it for copies of its parameters. Raises ``PlanError`` if
    it is not an optimizer."""
    if isinstance(optimizer, str):
        optimizer = named(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__, functools.partial(_like, optimizer)
    if not callable(optimizer):
        raise PlanError(
            f"optimizer is a {type(optimizer).__name__}; give an optimizer, a class such as torch.optim.AdamW, or its name."
        )
    function: Callable[..., torch.optim.Optimizer] = optimizer
    return getattr(function, "__name__", type(function).__name__), lambda copies: function([*copies.values()])


def _stepped(make: Make, parameters: list[Tensor], device: str) -> list[Tensor]:
    """The state after a step with copies of these parameters."""
    copies: Copies = {}
    for parameter in parameters:
        shape = local_of(parameter).shape  # an optimizer keeps state for this rank's part
        copies[parameter] = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device))
        copies[parameter].grad = torch.zeros_like(copies[parameter]) if parameter.requires_grad else None
    optimizer = make(copies)
    optimizer.step()
    return [*_tensors(optimizer.state.values())]


def _like(optimizer: torch.optim.Optimizer, copies: Copies) -> torch.optim.Optimizer:
    """An optimizer of the same class and options for copies of its parameters. It has state only for those that do not
    train, which some optimizers make beforehand."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    other.__dict__.pop("step", None)  # a scheduler wraps the original optimizer's method
    other.state = defaultdict(
        dict, {copies[one]: dict(optimizer.state[one]) for one in copies if _is_idle(optimizer, one)}
    )
    if isinstance(optimizer, torch.optim.Adagrad):  # before PyTorch 2.13, Adagrad made its state at once
        for copied in copies.values():
            other.state.setdefault(copied, {"step": torch.tensor(0.0), "sum": torch.zeros_like(copied)})
    chosen = [[copies[one] for one in group["params"] if one in copies] for group in optimizer.param_groups]
    other.param_groups = [
        {**group, "params": own} for group, own in zip(optimizer.param_groups, chosen, strict=True) if own
    ]
    return other


def _is_idle(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return not parameter.requires_grad and parameter in optimizer.state


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)

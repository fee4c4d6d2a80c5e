# ruff: noqa: E501
"""Changes between two steps as training code makes them: adapters, hooks, schedules, patched functions, flags of PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.fuzz.changed import Computes, follows

Case = tuple[Callable[..., Any], Callable[[Any], Any], Callable[[Any], Any]]


class Steers:
    """A hook with a state, which adds a direction."""

    def __init__(self) -> None:
        self.direction, self.scale = torch.ones(4), 1.0

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result + self.direction * self.scale

    def called(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return self(module, args, result)


def _part(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = self.part(y)
    return made


def _held(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = self.held[0](y)
    return made


def _with(**attributes: Callable[[], Any]) -> Callable[[Any], None]:
    def prepare(module: Any) -> None:
        for name, make in attributes.items():
            setattr(module, name, make())

    return prepare


def _hooked(make: Callable[[], Any]) -> Callable[[Any], None]:
    def prepare(module: Any) -> None:
        module.part = nn.Tanh()
        module.part.register_forward_hook(make())

    return prepare


def _hook(module: Any) -> Any:
    return next(iter(module.part._forward_hooks.values()))


def _scaling(held: Any, *args: Any) -> Any:
    return args[-1] * held[0]


def _scaled(held: Any, forward: Callable[..., Any], x: torch.Tensor) -> Any:
    return forward(x) * held[0]


def _hooked_in_a_list(module: Any) -> None:
    module.held = [nn.Tanh()]
    module.held[0].register_forward_hook(Steers())


_BOUND = _hooked(lambda: Steers().called)
_PARTIAL = _hooked(lambda: functools.partial(_scaling, [1.0]))
_SCALED = _with(part=lambda: functools.partial(_scaling, [1.0]))
_STEERED = _with(part=lambda: functools.partial(Steers().called, nn.Tanh(), ()))
CASES: dict[str, dict[str, Case]] = {
    "hooks with a state": {
        "number of a hook": (_part, _hooked(Steers), lambda m: setattr(_hook(m), "scale", 2.0)),
        "tensor of a hook, written": (_part, _hooked(Steers), lambda m: _hook(m).direction.mul_(2)),
        "tensor of a hook, replaced": (_part, _hooked(Steers), lambda m: setattr(_hook(m), "direction", torch.zeros(4))),
        "number behind a method as a hook": (_part, _BOUND, lambda m: setattr(_hook(m).__self__, "scale", 2.0)),
        "tensor behind a method as a hook": (_part, _BOUND, lambda m: _hook(m).__self__.direction.mul_(2)),
        "argument of a partial as a hook": (_part, _PARTIAL, lambda m: _hook(m).args[0].__setitem__(0, 2.0)),
        "hook of a module that is not registered": (_held, _hooked_in_a_list, lambda m: setattr(next(iter(m.held[0]._forward_hooks.values())), "scale", 2.0)),
    },
    "functions with arguments": {
        "argument of a partial": (_part, _SCALED, lambda m: m.part.args[0].__setitem__(0, 2.0)),
        "tensor in a partial": (_part, _with(part=lambda: functools.partial(torch.mul, torch.ones(4))), lambda m: m.part.args[0].mul_(2)),
        "number behind a method in a partial": (_part, _STEERED, lambda m: setattr(m.part.func.__self__, "scale", 2.0)),
        "tensor behind a method in a partial": (_part, _STEERED, lambda m: m.part.func.__self__.direction.mul_(2)),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for group in CASES.values() for name, case in group.items()]
)
def test_changes_between_steps(case: Case) -> None:
    compute, prepare, change = case
    torch.manual_seed(0)
    follows(Computes(compute, prepare), lambda model: (change(model), None)[1])


def test_what_a_forward_method_of_the_model_itself_holds() -> None:
    model, held = Computes(lambda self, y, x: y), [1.0]
    model.forward = functools.partial(_scaled, held, model.forward)  # type: ignore[method-assign]
    follows(model, lambda model: held.__setitem__(0, 2.0))

"""The root of a model sharded by FSDP2, while it runs by plans.

A planned call is one program that gathers and reduces by itself, so FSDP2's hooks on the root are removed, and this
module does the rest of their work. Hooks of inner units stay; they run only when the model runs without a plan.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lowtide.errors import LowtideError, PlanError
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.distributed.sharded import Unit, begun, state_of
from lowtide.sharing.order import CollectiveOrder
from lowtide.store import content_key

_MADE: Counter[str] = Counter()  # number of planned models, by layout


class ShardedRoot:
    """Replaces the model's original ``forward``. Calling it runs that ``forward`` with FSDP2's hooks around it."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self.state, self.forward = state_of(model), forward
        functools.update_wrapper(self, forward, updated=())
        if self.state._training_state.name == "FORWARD":  # in the model's first call, after FSDP2's hook
            self.state._post_forward(model, (), None)
        units = begun(model)
        self.order, self.settle = _order(units), [unit.settle for unit in units]
        handles = (self.state._pre_forward_hook_handle, self.state._post_forward_hook_handle)
        places = [(handle.hooks_dict_ref(), handle.id) for handle in handles]
        self._taken = [(hooks, key, hooks.pop(key)) for hooks, key in places]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.state._modules[0]
        for settle in self.settle:
            settle()
        args, kwargs = self.state._pre_forward(module, args, kwargs)
        return self.state._post_forward(module, args, self.forward(*args, **kwargs))

    def received(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments on the model's device, cast as its mixed-precision policy says."""
        device = self.state._device
        if device.type != "cpu" and (args or kwargs):
            from torch.distributed.utils import _to_kwargs

            several, named = _to_kwargs(tuple(args), dict(kwargs), device, False)
            args, kwargs = several[0], named[0]
        cast: tuple[tuple[Any, ...], dict[str, Any]] = self.state._cast_forward_inputs(tuple(args), dict(kwargs))
        return cast

    def handed(self, result: Any) -> Any:
        """The result, cast as the policy says."""
        return self.state._cast_output_dtype(result)

    def planned(
        self, plan: Callable[..., tuple[Program, Plan]], name: str, forget: Callable[[], None]
    ) -> tuple[Program, Plan]:
        """Return the program to run and its plan, made by ``plan``, which takes ``known`` schedules. All ranks keep to
        one order of collectives; ``forget`` drops entries with another order. ``name``: the model's name, for
        messages."""
        order = self.order
        try:
            found = self._in_order(plan, name, forget)
        except LowtideError as error:
            order.begin(str(error))
            raise
        order.begin()
        return found

    def _in_order(
        self, plan: Callable[..., tuple[Program, Plan]], name: str, forget: Callable[[], None]
    ) -> tuple[Program, Plan]:
        for _ in range(2):  # another rank may settle the order during the first try
            program, made = plan(known=self.order.schedules)
            if self.order.settles(program, made.schedule):
                return program, made
        if not self.order.change(program, made.schedule):
            raise PlanError(
                f"within {made.budget_bytes} bytes this call of {name} needs its collectives in another order than the ranks "
                "have settled on, and not all of them have calls of these shapes. Give rematerialize the largest sample that "
                "there will be, so that its plan serves all, or raise the budget."
            )
        forget()
        return program, made

    def end(self) -> None:
        """Put FSDP2's hooks back in their places: first before the pass, last after it."""
        for number, (hooks, key, hook) in enumerate(self._taken):
            hooks[key] = hook
            if number == 0:
                hooks.move_to_end(key, last=False)
        self._taken.clear()


def _order(units: Sequence[Unit]) -> CollectiveOrder:
    """The order of collectives of a model with these units. It is the same on all ranks, if they make their models in
    one order."""
    meshes = {parameter.device_mesh for unit in units for parameter in unit.parameters}  # type: ignore[attr-defined]
    ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    layout = content_key([(unit.name, unit.describe(range(len(unit.forms)))) for unit in units], ranks)
    _MADE[layout] += 1
    return CollectiveOrder(f"{layout}/{_MADE[layout]}", ranks)

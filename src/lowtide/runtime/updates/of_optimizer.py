"""The updates that one optimizer makes inside backward passes, and what its ``step`` then finds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lowtide.errors import ExecutionError
from lowtide.runtime.updates.moving_states import MovingStates, saved_whole
from lowtide.runtime.updates.optimizer_step import order_state, step_for, values_of
from lowtide.runtime.updates.spent import SpentGradient, SpentGradients


class OptimizerUpdates:
    """Updates by ``optimizer`` for parameters of a planned model named ``name``. ``states``: those that may lie in a
    second memory."""

    def __init__(self, optimizer: Optimizer, name: str, states: MovingStates | None = None) -> None:
        self.optimizer, self.name, self.states = optimizer, name, states
        self.updated: dict[int, torch.Tensor] = {}  # parameters updated since the optimizer's last step
        self._versions: dict[int, int] = {}  # their versions after the update
        self._skipped: set[int] = set()  # those of them that a failed pass has updated
        self._spent = SpentGradients()
        self._used: dict[int, dict[str, Any]] = {}  # by group: the hyperparameters used
        self._groups: dict[int, tuple[int, dict[str, Any]]] = {}  # by parameter: its group
        self._known = set[int]()  # parameters with a state before this step's backward passes
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(saved_whole),
        ]

    @property
    def ended(self) -> bool:
        return not self._hooks

    def end(self) -> None:
        """Stop updating in backward passes."""
        while self._hooks:
            self._hooks.pop().remove()
        self._spent.hide(self.updated, self._skipped)
        if self.states is not None:
            self.states.end()

    def groups(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """By id of a parameter: the number of its group, and the group, as they are now."""
        self._groups = {
            id(parameter): (number, group)
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        return self._groups

    def abandon(self) -> None:
        """The last backward pass did not end: parameters that it updated are not updated again."""
        self._skipped.update(self.updated)

    def begin(self) -> None:
        """A backward pass begins. Order the step hooks: a user's hooks before the step see spent gradients, not missing
        ones, and gradients that they set are for the step."""
        before: Any = self.optimizer._optimizer_step_pre_hooks  # both are ordered dictionaries
        after: Any = self.optimizer._optimizer_step_post_hooks
        for hook, hooks, last in zip(self._hooks, (before, after), (True, False), strict=False):
            hooks.move_to_end(hook.id, last=last)
        self._note_known()

    def _note_known(self) -> None:
        if not self.updated:
            self._known = set(map(id, self.optimizer.state))

    def check(self, parameters: list[torch.Tensor]) -> None:
        """Raise ``ExecutionError`` if these parameters may not be updated, because the loop is not ``backward();
        step(); zero_grad()``."""
        if self.updated.keys() - self._skipped:
            raise ExecutionError(
                f"a backward pass has updated {len(self.updated)} parameters of {self.name}, and another one comes before "
                "optimizer.step(). Call step() after each backward pass; where gradients of several passes are added up, run "
                "those before the last inside lowtide.accumulating(model); where the loop decides afterwards whether to step, "
                "leave out optimizer= in lowtide.rematerialize."
            )
        for parameter in parameters:
            if isinstance(parameter.grad, SpentGradient) and not parameter.grad.is_zeroed:
                raise ExecutionError(
                    f"gradients of {self.name} were used by updates and not set to zero since: others cannot be added to them. "
                    "Call optimizer.zero_grad() between backward passes."
                )

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, fetched: Any = None) -> Any:
        """Run the optimizer's step for the parameter alone, unless it was frozen since the forward pass. Its gradient
        is spent afterwards. Returns ``fetched``, the ``FetchedState`` that is to be stored."""
        if not parameter.requires_grad:
            return fetched
        key = id(parameter)
        number, group = self._groups[key]
        with torch.no_grad():
            before = parameter.grad
            if before is None or isinstance(before, SpentGradient):
                parameter.grad = gradient
            else:
                before.add_(gradient)
            del gradient, before
            self.updated[key] = parameter
            try:
                if key not in self._skipped:
                    if number not in self._used:
                        self._used[number] = values_of(group)
                    step = functools.partial(step_for, self.optimizer, group, parameter, self.optimizer.state)
                    if self.states is None:
                        step()
                    else:
                        self.states.update(parameter, fetched, step)
            finally:
                parameter.grad = self._spent.made(parameter)
                self._versions[key] = parameter._version
        return fetched

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_known()  # of passes without planned calls
        self._hide()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def hiding() -> Any:
            result = closure()
            self._hide()
            return result

        return ((args[0], hiding, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": hiding})

    def _hide(self) -> None:
        """Hide spent gradients from the step. Raises ``ExecutionError`` if the step would have differed from the
        updates made."""
        for number, used in self._used.items():
            now = values_of(self.optimizer.param_groups[number]) if number < len(self.optimizer.param_groups) else {}
            changed = next((key for key in used if used[key] != now.get(key)), None)
            if changed is not None:
                self._used.clear()
                raise ExecutionError(
                    f"{changed!r} of parameter group {number} was changed between the backward pass, which has updated the "
                    f"parameters with the value of then, and optimizer.step(). Change it before the backward pass."
                )
        self._used.clear()
        self._refuse_written()
        replaced = self._spent.replaced(self.updated.keys() - self._skipped, self.updated)
        if replaced:
            self._skipped |= replaced
            raise ExecutionError(
                f"gradients of {len(replaced)} parameters of {self.name} were replaced or set to zero between the backward "
                "pass, which had updated them already, and optimizer.step(): give lowtide.rematerialize keep_gradients=True."
            )
        self._spent.hide(self.updated, self._skipped)
        if self.states is not None:
            self.states.step_kept()

    def _refuse_written(self) -> None:
        versions, self._versions, updated = self._versions, {}, self.updated
        written = sum(updated[key]._version != version for key, version in versions.items() if key in updated)
        if written:
            raise ExecutionError(
                f"{written} parameters of {self.name} were written between the backward pass, which had updated them already, "
                "and optimizer.step(): weight decay or clamping by hand would come before the update in a plain loop. Do it "
                "after step(), or leave out optimizer= in lowtide.rematerialize."
            )

    def _after_step(self, *_: Any) -> None:
        self._spent.show(self.updated)
        order_state(self.optimizer, self._known)
        self.updated.clear()
        self._skipped.clear()
        if self.states is not None:
            self.states.show_kept()

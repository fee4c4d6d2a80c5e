"""An optimizer whose updates happen inside of the backward pass.

Each parameter is updated by the optimizer's own ``step``, run for it alone on the optimizer's own state: the classes of
``torch.optim`` that are taken treat every parameter by itself, so the results are those of one step for all. What the loop
does afterwards stays as it is: ``optimizer.step()`` finds what was updated without a gradient, and does the rest.

Where a backward pass may not update (``UpdatingOptimizer.begin``), gradients are kept and ``optimizer.step()`` does all. What
can only be seen when it is too late (a step that never came, another learning rate before it) is an error.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowtide.capture.arguments import has_hooks
from lowtide.errors import ExecutionError
from lowtide.program.program import Program
from lowtide.program.updates import with_updates
from lowtide.runtime.updates.leaves import OtherPasses, accelerate_accumulates, accumulates, accumulating_nodes, pointer
from lowtide.runtime.updates.moving_gradients import MovingGradients
from lowtide.runtime.updates.moving_states import MovingStates, saved_whole
from lowtide.runtime.updates.optimizer_step import ParameterStep, order_state, plain_step, step_for, values_of
from lowtide.runtime.updates.spent import SpentGradient, SpentGradients, fill_zeroed

_LOG = logging.getLogger(__name__)
_MOST_REFUSALS = 2  # in a row, after which gradients are kept from the forward pass on


class Call(Protocol):
    """A forward pass that waits for its backward pass."""

    generator: Any
    inputs: list[torch.Tensor]
    received: bool
    optimizer: UpdatingOptimizer | None


class UpdatingOptimizer:
    """``optimizer`` for the parameters of a planned model. ``accumulating``: how many contexts say that gradients stay, which
    they always do where it ``keeps`` them. ``states`` that may lie elsewhere, and ``gradients`` that leave instead of being
    used by updates."""

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        states: MovingStates | None = None,
        gradients: MovingGradients | None = None,
        keeps: bool = False,
    ) -> None:
        self.optimizer, self.name, self.states, self.gradients = optimizer, name, states, gradients
        self.accumulating = 0
        self._refusals = _MOST_REFUSALS if keeps and gradients is None else 0
        self._said: set[str] = set()
        self._passes = OtherPasses()
        self._updated: dict[int, torch.Tensor] = {}  # since the last step of the optimizer
        self._versions: dict[int, int] = {}  # of these
        self._skipped: set[int] = set()  # of these, those that a pass which failed has updated
        self._spent = SpentGradients()
        self._used: dict[int, dict[str, Any]] = {}  # by group: the values that updates were made with
        self._groups: dict[int, tuple[int, dict[str, Any]]] = {}  # by parameter: its group
        self._under_way: Any = None
        self._known = set[int]()  # parameters that had a state before the backward passes of a step
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(saved_whole),
        ]

    def end(self) -> None:
        """Nothing is updated any more."""
        while self._hooks:
            self._hooks.pop().remove()
        self._spent.hide(self._updated, self._skipped)
        if self.gradients is not None:
            self.gradients.bring_home()
        if self.states is not None:
            self.states.end()

    def updated(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Which of the flat inputs of a call may be updated in its backward pass; none where gradients are kept."""
        if self.states is not None:
            self.states.send_away()
        inside_backward = torch._C._current_graph_task_id() != -1  # of a checkpoint, say
        adds = self.gradients is None and (self.accumulating > 0 or accelerate_accumulates())
        if adds or inside_backward or self._reason_to_keep() is not None:
            fill_zeroed(self.optimizer)
            return ()
        groups = self._find_groups()
        pointers = Counter(pointer(tensor) for tensor in inputs)
        return tuple(
            position
            for position, tensor in enumerate(inputs)
            if id(tensor) in groups
            and type(tensor) is nn.Parameter
            and tensor.requires_grad
            and pointers[pointer(tensor)] == 1
            and not has_hooks(tensor)
        )

    def _reason_to_keep(self) -> str | None:
        """Why gradients are kept, said once."""
        reason = None
        if self._refusals >= _MOST_REFUSALS:  # which has been said
            return ""
        if plain_step(self.optimizer) is None:
            reason = f"{type(self.optimizer).__name__} is none of torch.optim's that treat every parameter by itself"
        elif any(group.get("differentiable") for group in self.optimizer.param_groups):
            reason = "its steps are differentiated"
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            reason = "several processes exchange them"
        if reason is not None:
            self.say(reason)
        return reason

    def say(self, reason: str) -> None:
        """Why gradients are kept, once in the log."""
        if reason not in self._said:
            self._said.add(reason)
            _LOG.warning("gradients of %s are kept until optimizer.step(): %s", self.name, reason)

    def finish(
        self,
        program: Program,
        updated: Collection[int],
        tensors: Sequence[torch.Tensor],
        held: Iterable[torch.Tensor],
        share: float,
    ) -> Program:
        """``program`` with the updates of the flat inputs ``updated`` in it, of which ``tensors`` are the first; not of those
        that what is ``held`` elsewhere shares memory with. ``share``: of the states, that come from the second memory."""
        if self.gradients is not None:
            return self.gradients.leaving(program, updated)
        groups = self._find_groups()
        own = set(map(id, tensors))
        others = (tensor for tensor in (*held, *program.constants.values()) if id(tensor) not in own)
        pointers = set(map(pointer, others))
        steps: dict[int, ParameterStep] = {}
        made: dict[int, ParameterStep] = {}
        for position in updated:
            if pointer(tensors[position]) in pointers:
                continue
            number, group = groups[id(tensors[position])]
            steps[position] = made[number] = made.get(number) or ParameterStep(self, group)
        moves = self.states.moves({position: tensors[position] for position in steps}, share) if self.states else {}
        return with_updates(program, steps, moves)

    def _find_groups(self) -> dict[int, tuple[int, dict[str, Any]]]:
        self._groups = {
            id(parameter): (number, group)
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        return self._groups

    def give_up(self, reason: str) -> None:
        """Keep all gradients from now on, for this reason."""
        self._refusals = _MOST_REFUSALS
        self.say(reason)

    def called(self, call: Call) -> None:
        """A forward pass of the model has run."""
        self._passes.called(call)

    def begin(self, call: Call, node: Any, updated: Sequence[int]) -> bool:
        """Whether the backward pass that has come to ``call``, to ``node`` in the graph of autograd, may update the flat inputs
        ``updated``. Raises ``ExecutionError`` where the loop is not one of ``backward(); step(); zero_grad()``."""
        if self._under_way is not None:  # and did not come to its end
            self._skipped.update(self._updated)
            self._under_way = None
        self._hooks_last()
        if not self._updated:
            self._known = set(map(id, self.optimizer.state))
        if self.gradients is not None:
            self.gradients.begin()
        if not updated:  # its gradients are kept, and so are those that others add to them
            self._passes.keeps(call.inputs)
            return False
        groups = self._find_groups()
        parameters = [call.inputs[position] for position in updated]
        reason = self._refused(call, node, parameters)
        if reason is not None:
            self._refusals += not self.accumulating
            fill_zeroed(self.optimizer)
            self._passes.keeps(parameters)
            self.say(f"{reason}; this pass runs forward again without updates")
            return False
        if self._updated.keys() - self._skipped:
            raise ExecutionError(
                f"a backward pass has updated {len(self._updated)} parameters of {self.name}, and another one comes before "
                "optimizer.step(). Call step() after each backward pass; where gradients of several passes are added up, run "
                "those before the last inside lowtide.accumulating(model); where the loop decides afterwards whether to step, "
                "leave out optimizer= in lowtide.rematerialize."
            )
        for parameter in parameters:
            if id(parameter) not in groups:
                raise ExecutionError("the optimizer lost a parameter between the forward and the backward pass.")
            if isinstance(parameter.grad, SpentGradient) and not parameter.grad.is_zeroed:
                raise ExecutionError(
                    f"gradients of {self.name} were used by updates and not set to zero since: others cannot be added to them. "
                    "Call optimizer.zero_grad() between backward passes."
                )
        self._refusals = 0
        self._under_way = weakref.ref(call)
        return True

    def _refused(self, call: Call, node: Any, parameters: Sequence[torch.Tensor]) -> str | None:
        """Why this backward pass may not update."""
        if not self._hooks:
            return "the model was restored after its forward pass"
        if self.accumulating and self.gradients is None:
            return "it runs inside lowtide.accumulating"
        if self._refusals >= _MOST_REFUSALS:
            return "its gradients are kept by now"
        if self._passes.add_to(parameters, call):
            return "another forward pass with these parameters waits for its backward pass, which adds to the same gradients"
        if any(map(has_hooks, parameters)):
            return "hooks on parameters are to see their gradients"
        places = accumulating_nodes(node)
        if any(id(parameter) not in places for parameter in parameters) or not accumulates(
            [places[id(parameter)] for parameter in parameters]
        ):
            return "the backward pass is one for some of the gradients (torch.autograd.grad, inputs=)"
        return None

    def _hooks_last(self) -> None:
        """What reads gradients in a hook before the step finds them spent, not missing, and what it sets is for the step."""
        before: Any = self.optimizer._optimizer_step_pre_hooks  # both are ordered dictionaries
        after: Any = self.optimizer._optimizer_step_post_hooks
        for hook, hooks, last in zip(self._hooks, (before, after), (True, False), strict=False):
            hooks.move_to_end(hook.id, last=last)

    def finished(self, call: Call) -> None:
        """The backward pass through ``call`` has made all its updates."""
        if self._under_way is not None and self._under_way() is call:
            self._under_way = None

    def has_updated(self, call: Call) -> bool:
        """Whether the backward pass through ``call``, which is under way, has made any, or sent gradients away."""
        changed = bool(self._updated) or (self.gradients is not None and self.gradients.sent)
        return changed and self._under_way is not None and self._under_way() is call

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, fetched: Any = None) -> Any:
        """One step of the optimizer for the parameter alone, unless that was frozen since the forward pass; its gradient is
        spent afterwards. ``fetched``: the ``FetchedState`` of it that is to be stored, which is returned."""
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
            self._updated[key] = parameter
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

    def failed(self, error: BaseException) -> None:
        """The backward pass has raised ``error``: say how far it came."""
        if self._updated and self._under_way is not None:
            error.add_note(
                f"lowtide: {len(self._updated)} parameters of {self.name} had been updated before this error, the others not. "
                "Until optimizer.step() is called, further backward passes update only those others."
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        """Take spent gradients from what the step sees. Raises ``ExecutionError`` where it would have been another step."""
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
        replaced = self._spent.replaced(self._updated.keys() - self._skipped, self._updated)
        if replaced:
            self._skipped |= replaced
            raise ExecutionError(
                f"gradients of {len(replaced)} parameters of {self.name} were replaced or set to zero between the backward "
                "pass, which had updated them already, and optimizer.step(): give lowtide.rematerialize keep_gradients=True."
            )
        self._spent.hide(self._updated, self._skipped)
        if self.states is not None:
            self.states.step_kept()

    def _refuse_written(self) -> None:
        versions, self._versions, updated = self._versions, {}, self._updated
        written = sum(updated[key]._version != version for key, version in versions.items() if key in updated)
        if written:
            raise ExecutionError(
                f"{written} parameters of {self.name} were written between the backward pass, which had updated them already, "
                "and optimizer.step(): weight decay or clamping by hand would come before the update in a plain loop. Do it "
                "after step(), or leave out optimizer= in lowtide.rematerialize."
            )

    def _after_step(self, *_: Any) -> None:
        self._spent.show(self._updated)
        order_state(self.optimizer, self._known)
        self._updated.clear()
        self._skipped.clear()
        if self.states is not None:
            self.states.show_kept()

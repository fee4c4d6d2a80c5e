"""Optimizers whose updates happen inside the backward pass.

Each parameter is updated by its optimizer's own ``step``, run for it alone on the optimizer's own state. Only classes
of ``torch.optim`` that treat every parameter by itself are used, so the results equal those of one step for all. The
loop stays as it is: ``optimizer.step()`` finds no gradients for updated parameters, and does the rest.

If a backward pass may not update (``UpdatingOptimizer.begin``), gradients are kept and ``optimizer.step()`` does all
updates. Loops that turn out to be wrong after the update (no step, or another learning rate before it) raise an error.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.capture.arguments import has_hooks
from lowtide.errors import ExecutionError
from lowtide.program.program import Program
from lowtide.program.updates import with_updates
from lowtide.runtime.updates.leaves import OtherPasses, accelerate_accumulates, accumulates, accumulating_nodes, pointer
from lowtide.runtime.updates.moving_gradients import MovingGradients
from lowtide.runtime.updates.moving_states import StatesOfAll
from lowtide.runtime.updates.of_optimizer import OptimizerUpdates
from lowtide.runtime.updates.optimizer_step import ParameterStep, plain_step
from lowtide.runtime.updates.spent import fill_zeroed

_LOG = logging.getLogger(__name__)
_MOST_REFUSALS = 2  # refused passes in a row; then gradients are always kept


class Call(Protocol):
    """A forward pass that waits for its backward pass."""

    generator: Any
    inputs: list[torch.Tensor]
    received: bool
    optimizer: UpdatingOptimizer | None


class UpdatingOptimizer:
    """The optimizers of a planned model named ``name``. ``of``: what each one updates. ``accumulating``: number of
    active contexts that keep gradients; with ``keeps`` they are always kept. ``gradients``: moves gradients away
    instead of using them in updates."""

    def __init__(
        self, of: Sequence[OptimizerUpdates], name: str, gradients: MovingGradients | None = None, keeps: bool = False
    ) -> None:
        self.of, self.name, self.gradients = of, name, gradients
        moving = [one.states for one in of if one.states is not None]
        self.states = StatesOfAll(moving) if moving else None
        self.accumulating = 0
        self._refusals = _MOST_REFUSALS if keeps and gradients is None else 0
        self._said: set[str] = set()
        self._passes = OtherPasses()
        self._under_way: Any = None
        self._by: dict[int, tuple[OptimizerUpdates, int, dict[str, Any]]] = {}  # for the current backward pass

    def end(self) -> None:
        """Stop updating in backward passes."""
        for one in self.of:
            one.end()
        if self.gradients is not None:
            self.gradients.bring_home()

    def fill_zeroed(self) -> None:
        """Replace spent gradients that were set to zero by real zeros, since other code may add to them now."""
        for one in self.of:
            fill_zeroed(one.optimizer)

    def updated(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The flat inputs of a call that its backward pass may update; none if gradients are kept."""
        if self.states is not None:
            self.states.send_away()
        inside_backward = torch._C._current_graph_task_id() != -1  # in a checkpoint, say
        adds = self.gradients is None and (self.accumulating > 0 or accelerate_accumulates())
        if adds or inside_backward or self._refusals >= _MOST_REFUSALS:
            self.fill_zeroed()
            return ()
        groups = {key for one in self._updating() for key in one.groups()}
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

    def _groups(self) -> dict[int, tuple[OptimizerUpdates, int, dict[str, Any]]]:
        """By id of a parameter: what updates it, the number of its group there, and the group."""
        found = ((one, key, *place) for one in self.of for key, place in one.groups().items())
        return {key: (one, number, group) for one, key, number, group in found}

    def _updating(self) -> list[OptimizerUpdates]:
        """The optimizers that may update in the backward pass. For others, log once why not."""
        reasons = [(one, _reason_to_keep(one.optimizer)) for one in self.of]
        for one, reason in reasons:
            if reason is not None:
                self.say(reason)
                fill_zeroed(one.optimizer)
        return [one for one, reason in reasons if reason is None]

    def say(self, reason: str) -> None:
        """Log once why gradients are kept."""
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
        """Add the updates of the flat inputs ``updated`` to ``program``. ``tensors``: the first flat inputs. A
        parameter that shares memory with a tensor ``held`` elsewhere gets no update. ``share``: the part of the states
        that lies in the second memory."""
        if self.gradients is not None:
            return self.gradients.leaving(program, updated)
        groups = self._groups()
        own = set(map(id, tensors))
        others = (tensor for tensor in (*held, *program.constants.values()) if id(tensor) not in own)
        pointers = set(map(pointer, others))
        steps: dict[int, ParameterStep] = {}
        made: dict[tuple[int, int], ParameterStep] = {}
        for position in updated:
            if pointer(tensors[position]) in pointers:
                continue
            by, number, group = groups[id(tensors[position])]
            key = id(by), number
            steps[position] = made[key] = made.get(key) or ParameterStep(by.optimizer, group, self._update)
        moves = self.states.moves({position: tensors[position] for position in steps}, share) if self.states else {}
        return with_updates(program, steps, moves)

    def give_up(self, reason: str) -> None:
        """Keep all gradients from now on, and log the reason."""
        self._refusals = _MOST_REFUSALS
        self.say(reason)

    def called(self, call: Call) -> None:
        """A forward pass of the model has run."""
        self._passes.called(call)

    def begin(self, call: Call, node: Any, updated: Sequence[int]) -> bool:
        """Whether the backward pass that reached ``call`` at autograd's ``node`` may update the flat inputs
        ``updated``. Raises ``ExecutionError`` if the loop is not ``backward(); step(); zero_grad()``."""
        for one in self.of:
            if self._under_way is not None:  # it did not end
                one.abandon()
            one.begin()
        self._under_way = None
        if self.gradients is not None:
            self.gradients.begin()
        if not updated:  # gradients are kept, also those that other passes add
            self._passes.keeps(call.inputs)
            return False
        groups = self._by = self._groups()
        parameters = [call.inputs[position] for position in updated]
        reason = self._refused(call, node, parameters)
        if reason is not None:
            self._refusals += not self.accumulating
            self.fill_zeroed()
            self._passes.keeps(parameters)
            self.say(f"{reason}; this pass runs forward again without updates")
            return False
        if any(id(parameter) not in groups for parameter in parameters):
            raise ExecutionError("the optimizer lost a parameter between the forward and the backward pass.")
        for one in self.of:
            if own := [parameter for parameter in parameters if groups[id(parameter)][0] is one]:
                one.check(own)
        self._refusals = 0
        self._under_way = weakref.ref(call)
        return True

    def _refused(self, call: Call, node: Any, parameters: Sequence[torch.Tensor]) -> str | None:
        """Why this backward pass may not update, or ``None``."""
        if any(one.ended for one in self.of):
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

    def _update(self, parameter: torch.Tensor, *gradient: Any) -> Any:
        """Run the update with the optimizer that has the parameter now."""
        return self._by[id(parameter)][0].update(parameter, *gradient)

    def finished(self, call: Call) -> None:
        """The backward pass through ``call`` has made all its updates."""
        if self._under_way is not None and self._under_way() is call:
            self._under_way = None

    def has_updated(self, call: Call) -> bool:
        """Whether the current backward pass through ``call`` has updated parameters or sent gradients away."""
        changed = self._count() > 0 or (self.gradients is not None and self.gradients.sent)
        return changed and self._under_way is not None and self._under_way() is call

    def _count(self) -> int:
        """Number of parameters updated since the last step of their optimizer."""
        return sum(len(one.updated) for one in self.of)

    def failed(self, error: BaseException) -> None:
        """The backward pass raised ``error``: add a note that says how many parameters it had updated."""
        if self._count() and self._under_way is not None:
            error.add_note(
                f"lowtide: {self._count()} parameters of {self.name} had been updated before this error, the others not. "
                "Until optimizer.step() is called, further backward passes update only those others."
            )


def _reason_to_keep(optimizer: torch.optim.Optimizer) -> str | None:
    """Why gradients for this optimizer are kept, or ``None``."""
    if plain_step(optimizer) is None:
        return f"{type(optimizer).__name__} is none of torch.optim's that treat every parameter by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "its steps are differentiated"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several processes exchange them"
    return None

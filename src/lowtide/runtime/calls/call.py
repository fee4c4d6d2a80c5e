"""One call of a planned model: its generator, and how its backward program computes the gradients of each node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from lowtide.errors import ExecutionError
from lowtide.lower import GradientGroup, Lowered, Step
from lowtide.program import generators, layouts
from lowtide.program.distributed.local import has_forms, spec_for
from lowtide.program.results import GradientMask
from lowtide.program.sizes import device_of_inputs
from lowtide.program.tangents import owns_tangents
from lowtide.runtime.calls.arriving import Tangents, expected, is_held, place, wanted
from lowtide.runtime.calls.chain import Node, add_left_terms, ends_of
from lowtide.runtime.calls.resuming import resumed
from lowtide.runtime.calls.unmodified import AsLeft, modified, note_unseen
from lowtide.runtime.programs.rescue import Rescue
from lowtide.runtime.updates.optimizer import UpdatingOptimizer

# Further arguments: whether gradients are kept, whether other code holds those that arrived, and the flat inputs.
ForMask = Callable[[GradientMask, bool, bool, Sequence[torch.Tensor]], Lowered]
Copied = tuple[Sequence[int], Callable[[Mapping[int, torch.Tensor]], bool] | None]


@dataclass(eq=False, repr=False)
class ModelCall:
    """The state of one forward pass until its backward pass is done.

    - ``for_mask`` gives a program for the same call if gradients arrive for other outputs, arrive in another layout, or
      all have to be kept for ``optimizer.step()``.
    - ``nodes[i]``: what the i-th node of the chain returns, as pairs of a flat input and the number of a term of its
      gradient (see ``Lowered.terms``). ``gradients``: those that are ready. ``next_node``: the node that a backward
      pass reaches next.
    - ``on_backward`` and ``on_end`` are called when a backward pass reaches the call and when it leaves it.
    - ``rescue`` lowers the plan when memory runs out. ``running``: the program of the backward pass; ``restart``: the
      one to start over with, forward pass included.
    - ``ends[i]``: how many gradient groups must have run for node ``i``; ``ran``: how many have run.
    - ``arrived``: the gradients of the outputs, kept for a restart. ``begin`` hands them to the program.
    - ``copied``: see ``programs.changing``; ``late``: see ``calls.step``. ``superseded``: the gradients have to leave
      as terms, see ``calls.waiting``.
    """

    begun: ClassVar[int] = 0  # number of forward passes that ran in this process

    lowered: Lowered
    for_mask: ForMask
    inputs: list[torch.Tensor]
    nodes: tuple[Node, ...]
    device_type: str
    tangents: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    as_left: AsLeft | None = None  # state of the tensors after the forward pass
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    rng_state: generators.SavedState | None = None
    generator: Step | None = None
    received: bool = False
    optimizer: UpdatingOptimizer | None = None
    copied: Copied = ((), None)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    late: Callable[[], str] | None = None
    rescue: Rescue | None = None
    rescues: int = 0
    superseded: bool = False
    written: list[int] = field(default_factory=list)  # ops that have begun a write of the forward pass
    arrived: Tangents | None = None
    begin: Callable[[], None] | None = None
    running: Lowered | None = None
    restart: Lowered | None = None
    ends: Sequence[int] = ()
    ran: int = 0
    next_node: int = 0
    on_backward: Callable[[], None] | None = None
    on_end: Callable[[], None] | None = None

    def specs(self, node: int) -> tuple[Any, ...]:
        """The layouts of the gradients that the node returns, ``None`` for plain tensors; empty if all are plain."""
        if not has_forms():
            return ()
        placed = dict(self.lowered.program.placed)
        found = tuple(spec_for(self.inputs[i], placed.get(i)) for i, _ in self.nodes[node])
        return found if any(found) else ()

    def forward(self) -> list[torch.Tensor]:
        """Run the forward program and return the forward outputs."""
        lowered, kept = self.lowered, self.lowered.program.kept
        if lowered.addresses is not None:
            lowered.addresses.reserve()
        if lowered.random:
            self.rng_state = generators.saved(generators.default_generator(device_of_inputs(self.inputs)))
        self.copies = {i: layouts.copied(self.inputs[i]) for i in self.copied[0]}
        note_unseen(lowered, self.inputs)
        self.generator = lowered.step(self._given(lowered), self.tangents, self.written)
        handed = resumed(self.generator)
        outputs = list(handed)
        handed.clear()  # autograd marks these next: kept here they would form a cycle that is never freed
        own = len(outputs) - len(kept)
        self.kept = dict(zip(kept, outputs[own:], strict=True))
        self.as_left = AsLeft(lowered, self.inputs, outputs)
        ModelCall.begun += 1
        return outputs[:own]

    def _given(self, lowered: Lowered) -> list[torch.Tensor]:
        """The inputs with their values from before the forward pass, except those that the program updates at once."""
        known = {**self.copies, **{i: tensor for i, tensor in self.kept.items() if i not in lowered.at_once}}
        return [known.get(i, tensor) for i, tensor in enumerate(self.inputs)]

    def supersede(self) -> None:
        """The gradients have to leave as terms: copy the inputs that another call is about to update and this call
        reads again."""
        self.superseded = True
        updated = [i for i in self.lowered.at_once if i not in self.copies]
        changed = self._changed(updated, updated)
        self.copies.update((i, layouts.copied(self.inputs[i])) for i in updated if i not in changed)

    def receive(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of the forward outputs have arrived at ``node``: prepare the backward program.

        A backward pass for only some inputs runs only some gradient groups. Any later backward pass starts over.
        """
        if self.on_backward is not None:
            self.on_backward()
        assert self.as_left is not None
        changed = "" if self.late is None else self.late()
        if changed:
            raise ExecutionError(
                f"{changed}, but was another one in the forward pass. Code reads it in the backward pass (that of an autograd "
                "function, or a hook), which in a planned call has done so before. Change it after the backward pass."
            )
        copied, note = self.copied
        if copied and note is not None:
            note({i: self.inputs[i] for i in copied if self.as_left.is_written(self.inputs, i)})
        lowered, updated = self.lowered, self.lowered.program.updated
        updates = self.optimizer is not None and self.optimizer.begin(self, node, updated)
        keeps = bool(updated) and not updates
        whole = lowered.reads, lowered.reads
        self.superseded = self.superseded and not self._changed(*whole)  # changed inputs cannot be read again
        again = self.generator is None or self.received or keeps or self.superseded or not expected(lowered, gradients)
        constants = [value for value, later in lowered.reads_constants if later or again]
        self._check_unmodified(*(whole if again else (lowered.reads_after, lowered.reads_again)), constants)
        self.gradients.clear()
        self.next_node = 0
        given = [None if one is None else one.detach() for one in gradients]
        self.begin = functools.partial(self._begin, given, again, keeps)

    def _begin(self, gradients: list[torch.Tensor | None], again: bool, keeps: bool) -> None:
        """Hand the gradients to the program; by now the engine has released them."""
        held = owns_tangents(self.lowered.program.graph) and any(map(is_held, gradients))
        if again or held:
            self._run_again(gradients, keeps, held)
            return
        self.received = True
        self.arrived = Tangents(self.lowered, gradients)
        gradients.clear()
        self.tangents.extend(self.arrived.handed())
        self._run_by(self.lowered)

    def stage(self, node: int) -> tuple[torch.Tensor | None, ...]:
        """Run the next segment and return the gradients of ``nodes[node]``, ``None`` for inputs without one."""
        if node != self.next_node:
            raise ExecutionError(
                "a backward pass begins in the middle of a planned model, whose program runs from its outputs on. Schedules of "
                "pipelines that split it (ZeroBubble, ZBV, DualPipeV) do that: use GPipe, 1F1B or Interleaved1F1B, or call "
                "lowtide.restore(model)."
            )
        self.next_node += 1
        if self.begin is not None:
            begin, self.begin = self.begin, None
            begin()
        self._advance_to(node)
        if node + 1 == len(self.nodes) and self.generator is not None:
            self.generator.close()
            self.generator = None
        result = tuple(self.gradients.pop(term, None) for term in self.nodes[node])
        if node + 1 == len(self.nodes):
            self.gradients.clear()
            self.arrived = None
            if self.optimizer is not None:
                self.optimizer.finished(self)
            if self.rescue is not None:
                self.rescue.ended(self)
            if not torch._C._autograd._get_current_graph_task_keep_graph():  # keep_graph: retain_graph=True
                self.inputs.clear()  # the graph lives as long as the loss: free an earlier part's output
                self.kept.clear()
                self.copies.clear()
            if self.on_end is not None:
                self.on_end()
        return result

    def _advance_to(self, node: int) -> None:
        """Run the backward program until the node's gradients are ready. When memory runs out, start over with a lower
        plan; gradients that earlier nodes returned are then computed again but not returned again."""
        while True:
            try:
                if self.restart is not None:
                    self._begin_again(self.restart)
                running, end = self.running, self.ends[node]
                assert running is not None
                for group in running.gradient_groups[self.ran : end]:
                    assert self.generator is not None
                    self._advance(running, self.generator, group)
                    self.ran += 1
                if running is not self.lowered:
                    add_left_terms(self.gradients, self.nodes, node)
                return
            except Exception as error:
                running = self.running
                assert running is not None
                self.restart = self._rescued(error, running, self.nodes[:node])
                if self.restart is None:
                    raise
            if running is self.lowered:
                self._take(self.restart)

    def _begin_again(self, lowered: Lowered) -> None:
        """Start over with another plan for the program, or a program for other gradients, up to the backward pass."""
        self.restart, self.running = None, lowered
        self.generator = self._begun(lowered)
        self._run_by(lowered)

    def _run_by(self, lowered: Lowered) -> None:
        """Set ``lowered`` as the program of the backward pass, at its start."""
        self.running = lowered
        self.ends, self.ran = ends_of(lowered, self.nodes), 0

    def _take(self, lowered: Lowered) -> None:
        """Use another plan. Its arena, if it has one, replaces the memory of the former one."""
        self.lowered = lowered
        if lowered.addresses is not None:
            lowered.addresses.reserve()

    def _begun(self, lowered: Lowered) -> Step:
        """Run the forward pass again with the same random numbers and no writes. Returns its generator, ready for the
        backward pass."""
        tangents: list[torch.Tensor] = []
        generator = lowered.step(self._given(lowered), tangents, None)
        with generators.replayed(self.rng_state):
            resumed(generator)
        assert self.arrived is not None
        tangents.extend(self.arrived.handed())
        return generator

    def _rescued(self, error: Exception, lowered: Lowered, left: Sequence[Node]) -> Lowered | None:
        """The program to start a failed backward pass over with, or ``None``. ``left``: nodes already returned."""
        if self.rescue is None:
            return None
        changed = self._changed(lowered.reads, lowered.reads)
        reason = f"{self._names(changed)} was modified since the forward pass ended" if changed else None
        if self.arrived is not None and not self.arrived.keep():
            reason = "the plan has let go of gradients that arrived"
        if self.optimizer is not None and self.optimizer.has_updated(self):
            reason = "parameters have been updated in it already, or gradients have left"
        return self.rescue.again(self, lowered, error, reason, [term for each in left for term in each])

    def failed(self, error: BaseException) -> None:
        """End the call after an error in the backward pass; the optimizer adds to the error what was updated before."""
        if self.received:
            self.generator = None  # an error ends a generator
        if self.optimizer is not None:
            self.optimizer.failed(error)

    def let_go(self) -> None:
        """Free what a failed pass holds."""
        self.generator = None
        self.tangents.clear()
        self.gradients.clear()

    def _advance(self, lowered: Lowered, generator: Step, group: GradientGroup) -> None:
        """Run the backward program until it yields the gradients of the group."""
        values = resumed(generator)
        for index in reversed(group.gradients):
            self.gradients[lowered.terms[index]] = values.pop()

    def _run_again(self, gradients: list[torch.Tensor | None], keeps: bool, held: bool) -> None:
        """Gradients arrived otherwise than planned, or for a second time: have the forward pass run again.

        It runs with the random numbers of the first run and writes nothing to the inputs. The backward pass then runs
        as far as it is asked to.
        """
        self.generator = None
        program = self.lowered.program
        mask = wanted(program, gradients)
        same = mask == program.mask and not (keeps or held or self.superseded)
        lowered = self.lowered if same else self.for_mask(mask, keeps, held, self.inputs)
        if list(map(place, lowered.program.results)) != list(map(place, program.results)):
            raise ExecutionError(
                "the program for the gradients that arrived returns other tensors than the one that was run, so these cannot "
                "be handed to it. Call lowtide.restore(model) for that part of the work, or run it under lowtide.online."
            )
        self._check_updates(lowered)
        self.received = True
        self.arrived = Tangents(lowered, gradients)
        gradients.clear()
        self.running = self.restart = lowered
        torch.autograd.Variable._execution_engine.queue_callback(self._left)

    def _left(self) -> None:
        """End of a backward pass that ran again but was asked for only some gradients. The next one starts over."""
        if self.arrived is not None:
            self.let_go()
            self.arrived = self.restart = None

    def _check_updates(self, lowered: Lowered) -> None:
        """Raise ``ExecutionError`` if the other program reads inputs that this call updated, or lost old values."""
        if changed := self._changed(lowered.at_once, lowered.at_once):
            raise modified(self._names(changed), False)
        if gone := [i for i in lowered.program.kept_for_backward if i not in self.kept]:
            raise ExecutionError(
                "gradients of other outputs arrived than the call was planned for, and their program needs what "
                f"{self._names(gone)} was before the forward pass wrote it, which is gone. Call lowtide.restore(model) for "
                "that part of the work."
            )

    def _changed(self, read: Sequence[int], again: Sequence[int]) -> list[int]:
        """As ``AsLeft.changed``, without the inputs that the call has copies of."""
        assert self.as_left is not None
        return [i for i in self.as_left.changed(self.inputs, read, again) if i not in self.copies]

    def _names(self, inputs: Sequence[int]) -> str:
        names = self.lowered.program.state_names
        return ", ".join(names[i][0] if i < len(names) else f"argument {i - len(names)}" for i in inputs)

    def _check_unmodified(self, read: Sequence[int], again: Sequence[int], constants: Iterable[int]) -> None:
        assert self.as_left is not None
        if self.as_left.constants_changed(constants):
            raise modified("a tensor that the model holds", False)
        changed, note = self._changed(read, again), self.copied[1]
        outputs = self.as_left.outputs_changed()
        if changed or outputs:
            later = note is not None and note({i: self.inputs[i] for i in changed}) and not outputs
            raise modified(self._names(changed), later)


def call_of(outputs: Sequence[torch.Tensor]) -> ModelCall | None:
    """The planned call that returned these outputs, ``None`` if none of them has a gradient."""
    return next((call for call in map(maker_of, outputs) if isinstance(call, ModelCall)), None)


def maker_of(tensor: torch.Tensor) -> Any:
    """The call that returned this tensor, or ``None``. A view is an alias of what the call's node returned."""
    node = tensor.grad_fn
    if node is not None and node.name() == "AliasBackward0":
        node = node.next_functions[0][0]
    return getattr(node, "call", None)

"""One call of a planned model: its generator, and the chain of autograd nodes that drives it.

The chain mirrors the backward program. Seen from the result, the first node receives the gradients of the outputs; each
further node runs the next segment of the backward program and returns the gradients that became final in it. The nodes
are linked by empty tensors, so the engine runs them one after the other and accumulates each group of gradients in
between, as it does in eager.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import CreationMeta, _set_creation_meta
from torch._C._functorch import is_legacy_batchedtensor

from lowtide.errors import ExecutionError
from lowtide.lower import GradientGroup, Lowered, Step
from lowtide.memory.arena import AddressTable
from lowtide.program import generators, layouts
from lowtide.program.results import GradientMask, Result, with_views
from lowtide.program.sizes import device_of_inputs
from lowtide.runtime.optimizer import UpdatingOptimizer, noting_failure
from lowtide.runtime.result_hooks import refuse_hooks

ForMask = Callable[[GradientMask, bool], Lowered]  # whether gradients are kept
Node = tuple[tuple[int, int], ...]
_SPARE_TERMS = 6  # of a gradient, where a program for other gradients has more of them than the one that ran forward


@dataclass(eq=False, repr=False)
class ModelCall:
    """The state of one forward pass until its backward pass is done.

    ``for_mask`` gives the same program for gradients of other outputs, or in another layout, or one that keeps all of them for
    the step of ``optimizer``. ``inputs``: the flat inputs.
    ``nodes[i]``: what the i-th node of the chain returns, as pairs of a flat input and the number of a term of its gradient
    (see ``Lowered.terms``); ``gradients``: those that are ready. ``on_backward`` and ``on_end`` are called when a backward pass
    comes to it and when it leaves it.
    """

    lowered: Lowered
    for_mask: ForMask
    inputs: list[torch.Tensor]
    nodes: tuple[Node, ...]
    device_type: str
    tangents: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    versions: list[int | None] = field(default_factory=list)
    output_versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    rng_state: generators.SavedState | None = None
    generator: Step | None = None
    received: bool = False
    optimizer: UpdatingOptimizer | None = None
    on_backward: Callable[[], None] | None = None
    on_end: Callable[[], None] | None = None

    def forward(self) -> list[torch.Tensor]:
        """Run the forward program; returns the forward outputs."""
        lowered, kept = self.lowered, self.lowered.program.kept
        if lowered.addresses is not None:
            lowered.addresses.reserve()
        if lowered.random:
            self.rng_state = generators.saved(generators.default_generator(device_of_inputs(self.inputs)))
        self.generator = lowered.step(list(self.inputs), self.tangents, True)
        handed = resumed(self.generator)
        outputs = list(handed)
        handed.clear()  # the generator must not keep what autograd is about to mark: the cycle would never be freed
        own = len(outputs) - len(kept)
        self.kept = dict(zip(kept, outputs[own:], strict=True))
        self.versions = [version_of(tensor) for tensor in self.inputs]
        self.output_versions = [(outputs[i].detach(), outputs[i]._version) for i in lowered.reads_outputs]
        return outputs[:own]

    def receive(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of the forward outputs have arrived at ``node``: start the backward program, in its first state.

        A backward pass to some of the inputs alone runs some of the gradient groups; whatever comes after it starts over.
        """
        if self.on_backward is not None:
            self.on_backward()
        lowered, updated = self.lowered, self.lowered.program.updated
        updates = self.optimizer is not None and self.optimizer.begin(self, node, updated)
        keeps = bool(updated) and not updates
        again = self.generator is None or self.received or keeps or not _expected(lowered, gradients)
        self._check_unmodified(lowered.reads if again else lowered.reads_after)
        self.gradients.clear()
        if again:
            self._run_again(gradients, keeps)
        else:
            self.received = True
            self.tangents.extend(_prepared(lowered, gradients))

    def stage(self, node: int) -> tuple[torch.Tensor | None, ...]:
        """Run the next segment; the gradients of ``nodes[node]``, ``None`` for inputs that have none."""
        if self.generator is not None:
            groups = self.lowered.gradient_groups
            if node < len(groups):
                self._advance(self.lowered, self.generator, groups[node])
            if node + 1 >= len(groups):
                self.generator.close()
                self.generator = None
        if node + 1 == len(self.nodes):
            self._add_left_terms()
        result = tuple(self.gradients.pop(term, None) for term in self.nodes[node])
        if node + 1 == len(self.nodes):
            self.gradients.clear()
            if self.optimizer is not None:
                self.optimizer.finished(self)
            if not torch._C._autograd._get_current_graph_task_keep_graph():  # as by retain_graph=True
                self.inputs.clear()  # the graph lives as long as the loss; an earlier part's output need not
                self.kept.clear()
            if self.on_end is not None:
                self.on_end()
        return result

    def _add_left_terms(self) -> None:
        """Of a program for other gradients, terms for which no node has a place go to the last place that there is."""
        places = dict(sorted(term for node in self.nodes for term in node))  # position -> its last number
        for position, number in sorted(self.gradients):
            last = places.get(position, 0)
            if number > last:
                added = self.gradients.pop((position, number))
                before = self.gradients.get((position, last))
                self.gradients[position, last] = added if before is None else before + added

    def _advance(self, lowered: Lowered, generator: Step, group: GradientGroup) -> None:
        """Run the backward program until the gradients of the group have left it."""
        values = resumed(generator)
        for index in reversed(group.gradients):
            self.gradients[lowered.terms[index]] = values.pop()

    def _run_again(self, gradients: Sequence[torch.Tensor | None], keeps: bool) -> None:
        """Other gradients than expected, or a second backward pass: run the forward pass again and all of the backward.

        The forward pass runs under its own generator state and writes nothing back, so its effects stay as they were.
        """
        self.generator = None
        program = self.lowered.program
        mask = tuple(_wanted(result, gradients) for result in program.results[: len(program.mask)])
        lowered = self.lowered if mask == program.mask and not keeps else self.for_mask(mask, keeps)
        if list(map(_place, lowered.program.results)) != list(map(_place, program.results)):
            raise ExecutionError(
                "the program for the gradients that arrived returns other tensors than the one that was run, so these cannot "
                "be handed to it. Call lowtide.restore(model) for that part of the work, or run it under lowtide.online."
            )
        tangents: list[torch.Tensor] = []
        inputs = [self.kept.get(i, tensor) for i, tensor in enumerate(self.inputs)]
        generator = lowered.step(inputs, tangents, False)
        with generators.replayed(self.rng_state):
            resumed(generator)
        tangents.extend(_prepared(lowered, gradients))
        for group in lowered.gradient_groups:
            self._advance(lowered, generator, group)
        generator.close()

    def _check_unmodified(self, read: Sequence[int]) -> None:
        changed = [i for i in read if version_of(self.inputs[i]) != self.versions[i]]
        changed_output = any(tensor._version != version for tensor, version in self.output_versions)
        if changed or changed_output:
            names = self.lowered.program.state_names
            what = ", ".join(names[i][0] if i < len(names) else f"argument {i - len(names)}" for i in changed)
            raise ExecutionError(
                f"{what or 'an output of the model'} was modified in place between the forward and the backward pass, "
                "which needs the value it had. Modify it after the backward pass, or modify a clone."
            )


def version_of(tensor: torch.Tensor) -> int | None:
    """Counts the writes into it."""
    return None if tensor.is_inference() else tensor._version


def _expected(lowered: Lowered, gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether these gradients are the ones that the program was made for."""
    program = lowered.program
    present = {i for i, gradient in enumerate(gradients) if gradient is not None}
    arrived = zip(lowered.tangents, (gradients[i] for i in program.tangents), strict=True)
    return present == set(program.tangents) and all(
        gradient is not None and _has_layout(gradient, program.metas[value].stride) for value, gradient in arrived
    )


def _has_layout(gradient: torch.Tensor, stride: Sequence[int]) -> bool:
    return layouts.is_equivalent(gradient.shape, gradient.stride(), stride)


def _wanted(result: Result, gradients: Sequence[torch.Tensor | None]) -> bool | tuple[int, ...]:
    """The mask entry for a result whose gradient arrived like this."""
    place = result.returned
    gradient = gradients[place] if place is not None and result.requires_grad else None  # not of one that is detached
    if gradient is None:
        return False
    return tuple(gradient.stride()) if gradient.numel() > 1 else True


def _place(result: Result) -> tuple[int | None, ...]:
    return result.returned, result.argument, result.base


def _prepared(lowered: Lowered, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The arriving gradients in the layout that the program was captured with, with their own numbers in memory."""
    prepared = []
    for value, output in zip(lowered.tangents, lowered.program.tangents, strict=True):
        gradient, meta = gradients[output], lowered.program.metas[value]
        assert gradient is not None
        gradient = gradient.detach()
        if gradient.is_conj() or not _has_layout(gradient, meta.stride):
            arrived, gradient = gradient, layouts.empty(meta)
            once = tuple(slice(None if step else 1) for step in meta.stride)  # where it is expanded
            gradient[once].copy_(arrived[once])
        prepared.append(gradient)
    return prepared


def _check_arriving(gradients: Sequence[torch.Tensor | None]) -> None:
    """A node's backward cannot be differentiated, nor take several gradients at once: it says so where that is asked for."""
    if torch.is_grad_enabled():  # create_graph=True
        raise ExecutionError(
            "a backward pass through a planned model cannot be differentiated again (create_graph=True: gradient penalties "
            "and the like). Call lowtide.restore(model) for that part of the work, or run it under lowtide.online."
        )
    if any(gradient is not None and is_legacy_batchedtensor(gradient) for gradient in gradients):
        raise ExecutionError(
            "a backward pass through a planned model takes one gradient at a time (is_grads_batched=True, vectorize=True). "
            "Loop over them with retain_graph=True, or call lowtide.restore(model) for that part of the work."
        )


class OutputNode(torch.autograd.Function):
    """Runs the forward program; its backward takes the gradients of the outputs and leaves the work to the gradient groups."""

    @staticmethod
    def forward(ctx: Any, call: ModelCall, fixed: tuple[int, ...], token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        with without_autocast(call.device_type):
            outputs = with_views(call.forward(), call.inputs, call.lowered.program.results)
        ctx.mark_non_differentiable(*(outputs[i] for i in fixed))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _check_arriving(gradients)
        _ = ctx.saved_tensors  # the engine's own error on a second backward pass without retain_graph=True
        with noting_failure(ctx.call):
            ctx.call.receive(ctx, gradients)
        return None, None, torch.empty(0)


class StageNode(torch.autograd.Function):
    """Its backward runs one segment of the backward program."""

    @staticmethod
    def forward(
        ctx: Any, call: ModelCall, node: int, token: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        ctx.node = node
        ctx.chained = token is not None
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:
        _check_arriving((token,))
        with without_autocast(ctx.call.device_type), noting_failure(ctx.call):
            gradients = ctx.call.stage(ctx.node)
        return None, None, torch.empty(0) if ctx.chained else None, *gradients


def resumed(generator: Step) -> list[torch.Tensor]:
    """What the step yields next; what is allocated afterwards is not its own."""
    with below_autograd():
        try:
            return next(generator)
        finally:
            AddressTable.end()


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Operators run as inside eager's forward pass: nothing is recorded, but kernels that ask find gradients enabled.

    The engine's own thread state is restored afterwards.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """The captured operators have the types that autocast chose already: they must not be cast again."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def run(
    lowered: Lowered,
    inputs: list[torch.Tensor],
    for_mask: ForMask,
    in_terms: bool = False,
    optimizer: UpdatingOptimizer | None = None,
) -> list[torch.Tensor]:
    """Forward outputs of the program on the flat ``inputs``, linked to them in the autograd graph. ``in_terms``: whether
    gradients leave as the terms of their sums."""
    program, nodes = lowered.program, _nodes(lowered, inputs, in_terms)
    call = ModelCall(lowered, for_mask, list(inputs), nodes, device_of_inputs(inputs).type, optimizer=optimizer)
    if optimizer is not None:
        optimizer.called(call)
    token = None
    for node in range(len(nodes) - 1, -1, -1):
        token = StageNode.apply(call, node, token, *(inputs[i] for i, _ in nodes[node]))  # type: ignore[no-untyped-call]
    differentiable = {result.returned for result in program.results if result.requires_grad}
    returned = len(program.graph.forward_outputs) - len(program.kept)
    fixed = tuple(i for i in range(returned) if i not in differentiable)
    outputs: list[torch.Tensor] = list(OutputNode.apply(call, fixed, token))  # type: ignore[no-untyped-call]
    for result in program.results:
        if result.returned is not None and result.view is not None:
            # Views of a function's outputs may not be written into.
            _set_creation_meta(outputs[result.returned], CreationMeta.DEFAULT)
    for index in lowered.inner:
        refuse_hooks(outputs[index])
    return outputs


def _nodes(lowered: Lowered, inputs: Sequence[torch.Tensor], in_terms: bool) -> tuple[Node, ...]:
    """What each node returns: the terms of its group, and the last one whatever else may come for inputs that require a
    gradient."""
    groups = [[lowered.terms[index] for index in group.gradients] for group in lowered.gradient_groups] or [[]]
    terms = Counter(position for position, _ in lowered.terms)
    for position, tensor in enumerate(inputs):
        if tensor.requires_grad:
            most = terms[position] + _SPARE_TERMS if in_terms else 1
            groups[-1].extend((position, number) for number in range(terms[position], most))
    return tuple(map(tuple, groups))

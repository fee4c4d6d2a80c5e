"""The chain of autograd nodes that drives a call of a planned model.

The chain mirrors the backward program. Counted from the result, the first node receives the gradients of the outputs.
Each further node runs the next segment of the backward program and returns the gradients that became final in it. Empty
tensors link the nodes, so the engine runs them one after the other and accumulates each group of gradients in between,
as in eager. These tensors are on the program's device: the engine runs a node in the thread of its device, where it
accumulates gradients, and on the stream of its forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import CreationMeta, _set_creation_meta

from lowtide.capture.arguments import has_hooks
from lowtide.errors import LowtideError
from lowtide.lower import Lowered
from lowtide.program import generators
from lowtide.program.distributed.local import whole_gradient, whole_of
from lowtide.program.results import with_views
from lowtide.program.sizes import device_of_inputs
from lowtide.program.targets import FailedOperatorError, UnexpectedValueError
from lowtide.runtime.calls.arriving import check_arriving, refuse_casts
from lowtide.runtime.calls.call import Copied, ForMask, ModelCall
from lowtide.runtime.calls.chain import nodes_of
from lowtide.runtime.calls.result_hooks import refuse_hooks
from lowtide.runtime.programs.rescue import Rescue, ran_out
from lowtide.runtime.updates.optimizer import UpdatingOptimizer


class OutputNode(torch.autograd.Function):
    """Runs the forward program. Its backward stores the gradients of the outputs; the stage nodes do the work."""

    @staticmethod
    def forward(ctx: Any, call: ModelCall, fixed: tuple[int, ...], token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.device = token.device
        ctx.save_for_backward(token)
        with without_autocast(call.device_type):
            outputs = with_views(call.forward(), call.inputs, call.lowered.program.results)
        ctx.mark_non_differentiable(*(outputs[i] for i in fixed))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        check_arriving(gradients)
        refuse_casts(ctx.call.lowered.program, ctx.call.device_type)
        _ = ctx.saved_tensors  # raises the engine's error on a second backward pass without retain_graph=True
        try:
            ctx.call.receive(ctx, gradients)
        except BaseException as error:
            ctx.call.failed(error)
            raise
        return None, None, torch.empty(0, device=ctx.device)


class StageNode(torch.autograd.Function):
    """Its backward runs one segment of the backward program."""

    @staticmethod
    def forward(
        ctx: Any, call: ModelCall, node: int, token: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        ctx.node = node
        ctx.chained = token is not None
        ctx.specs, ctx.device = call.specs(node), device_of_inputs(call.inputs)
        return torch.empty(0, device=ctx.device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:
        check_arriving((token,))
        try:
            with without_autocast(ctx.call.device_type):
                gradients = ctx.call.stage(ctx.node)
        except BaseException as error:
            ctx.call.failed(error)
            raise
        wholes = map(whole_gradient, gradients, ctx.specs) if ctx.specs else gradients
        return None, None, torch.empty(0, device=ctx.device) if ctx.chained else None, *wholes


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast: captured operators already have the types that autocast chose."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def run(
    lowered: Lowered,
    inputs: list[torch.Tensor],
    for_mask: ForMask,
    terms_from: int | None = None,
    optimizer: UpdatingOptimizer | None = None,
    rescue: Rescue | None = None,
    copied: Copied = ((), None),
    late: Callable[[], str] | None = None,
    catches: Callable[[], bool] | None = None,
) -> list[torch.Tensor]:
    """Run the program on the flat ``inputs`` and return its forward outputs, linked to the inputs in the autograd
    graph.

    - ``terms_from``: the first flat input whose gradient leaves as terms of its sum.
    - ``rescue`` lowers the plan if memory runs out.
    - ``copied``: inputs to copy, and a function to call with those that were written to before the backward pass.
    - ``late`` returns what has changed that eager's code would read in the backward pass.
    - ``catches``: whether the model's own code may catch the error of an operator. If so, such an error becomes a
      ``FailedOperatorError``, and all state is as before the call.
    """
    rescues = 0
    while True:
        in_order = optimizer is None and sum(tensor.requires_grad and has_hooks(tensor) for tensor in inputs) > 1
        linked = tuple(tensor.requires_grad for tensor in inputs)
        nodes = nodes_of(lowered, linked, terms_from, in_order)
        device_type = device_of_inputs(inputs).type
        call = ModelCall(lowered, for_mask, list(inputs), nodes, device_type, optimizer=optimizer, copied=copied)
        call.rescue, call.rescues, call.late = rescue, rescues, late
        try:
            return _linked(call, inputs)
        except UnexpectedValueError:
            generators.put_back(call.rng_state)
            raise
        except Exception as error:
            written = "buffers or arguments have been updated already" if call.written else None
            restart = None if rescue is None else rescue.again(call, lowered, error, written)
            if restart is None:
                theirs = not (call.written or ran_out(error) or isinstance(error, LowtideError))
                if theirs and catches is not None and catches():
                    generators.put_back(call.rng_state)
                    raise FailedOperatorError from error
                raise
        generators.put_back(call.rng_state)
        lowered, rescues = restart, call.rescues


def _linked(call: ModelCall, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the forward pass of ``call``, with its nodes in the autograd graph, and return the outputs."""
    program, nodes = call.lowered.program, call.nodes
    if call.optimizer is not None:
        call.optimizer.called(call)
    token = None
    for node in range(len(nodes) - 1, -1, -1):
        token = StageNode.apply(call, node, token, *(whole_of(inputs[i]) for i, _ in nodes[node]))  # type: ignore[no-untyped-call]
    differentiable = {result.returned for result in program.results if result.requires_grad}
    returned = len(program.graph.forward_outputs) - len(program.kept)
    fixed = tuple(i for i in range(returned) if i not in differentiable)
    outputs: list[torch.Tensor] = list(OutputNode.apply(call, fixed, token))  # type: ignore[no-untyped-call]
    for result in program.results:
        if result.returned is not None and result.view is not None:
            # Autograd forbids writes to views among a function's outputs, and to their bases except the first output.
            _set_creation_meta(outputs[result.returned], CreationMeta.DEFAULT)
            if result.requires_grad and result.returned > 0:
                outputs[result.returned] = torch.ops.aten.alias.default(outputs[result.returned])
    for index in call.lowered.inner:
        refuse_hooks(outputs[index])
    return outputs

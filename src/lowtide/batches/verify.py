"""Measure one step of a planned program without changing the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lowtide.batches.samples import Sample
from lowtide.capture import Captured
from lowtide.capture.arguments import flat_arguments
from lowtide.capture.model_state import model_state
from lowtide.errors import ExecutionError
from lowtide.lower import Lowered
from lowtide.memory.meter import measure
from lowtide.planning import Plan
from lowtide.program import generators
from lowtide.program.results import GradientMask
from lowtide.runtime.calls.step import run
from lowtide.runtime.programs.entry import lowered


def measured_peak(model: nn.Module, captured: Captured, plan: Plan, sample: Sample) -> int:
    """The exact peak in bytes of one forward and backward pass of ``plan`` on a real ``sample``.

    Parameters take part as new leaves on the same memory, buffers and tensors in attributes as copies. So gradients,
    the user's hooks and statistics stay unchanged.
    """
    state = model_state(model)
    parameters = [t.detach().requires_grad_(t.requires_grad) for t in state.tensors[: state.parameters]]
    buffers = [t.detach().clone() for t in state.tensors[state.parameters :]]
    tensors, _ = flat_arguments(*sample, state.tensors)
    own = [*parameters, *buffers, *tensors]
    found = captured.contract.flat_inputs(model, own)
    assert found is not None  # the model is unchanged since the capture
    inputs = [*own, *(t.detach().clone().requires_grad_(t.requires_grad) for t in found[len(own) :])]
    with generators.all_kept(), torch.enable_grad():
        peak = measure(_step, lowered(captured.program, plan, None), inputs).peak_bytes
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            tensor.grad = None
    return peak


def _step(step: Lowered, inputs: Sequence[torch.Tensor]) -> None:
    outputs = run(step, list(inputs), _no_other)
    roots = [outputs[index] for index in step.program.tangents]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _no_other(mask: GradientMask, keeps: bool, held: bool, inputs: Sequence[torch.Tensor]) -> Lowered:
    raise ExecutionError("a measured step was given other gradients than those it was planned for")

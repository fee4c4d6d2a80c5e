"""One measured step of a planned program, which leaves the model as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.batches.samples import Sample
from lowtide.capture import Captured
from lowtide.capture.capture import flat_arguments
from lowtide.capture.copies import model_state
from lowtide.errors import ExecutionError
from lowtide.lower import Lowered, lower
from lowtide.memory.meter import measure
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.runtime.step import Executable, run


@dataclass(frozen=True, slots=True, eq=False)
class _MeasuredStep:
    program: Program
    lowered: Lowered

    def for_mask(self, mask: GradientMask) -> Executable:
        raise ExecutionError("a measured step was given other gradients than those it was planned for")


def measured_peak(model: nn.Module, captured: Captured, plan: Plan, sample: Sample) -> int:
    """The exact peak of one forward and backward pass of ``plan`` on a real ``sample``.

    Parameters take part as new leaves on their own memory, buffers as copies, so that gradients, hooks of the user's and
    statistics are left alone; so are tensors in attributes.
    """
    state = model_state(model)
    parameters = [t.detach().requires_grad_(t.requires_grad) for t in state.tensors[: state.parameters]]
    buffers = [t.detach().clone() for t in state.tensors[state.parameters :]]
    tensors, _ = flat_arguments(*sample)
    own = [*parameters, *buffers, *tensors]
    found = captured.contract.flat_inputs(model, own)
    assert found is not None  # the model is as it was captured
    inputs = [*own, *(t.detach().clone().requires_grad_(t.requires_grad) for t in found[len(own) :])]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        peak = measure(
            _step, _MeasuredStep(captured.program, lower(captured.program, plan.schedule)), inputs
        ).peak_bytes
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            tensor.grad = None
    return peak


def _step(executable: _MeasuredStep, inputs: Sequence[torch.Tensor]) -> None:
    outputs = run(executable, list(inputs))
    roots = [outputs[index] for index in executable.program.tangents]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

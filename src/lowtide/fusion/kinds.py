"""Which operators Inductor turns into loops that can be fused, and which stay calls.

Matrix products, convolutions, attention, sorting, scatter additions, random operators, effects and everything unknown
stay calls: Inductor would call the same libraries (``fusion.autotune`` may choose another).
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from lowtide.ir import Op, is_view
from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program.program import Program, Ref


class Kind(enum.Enum):
    """What fusion may do with an operator."""

    VIEW = "view"  # free inside a kernel, and outside
    POINTWISE = "pointwise"  # each result element from a few input elements; may be recomputed in every reader
    GATHER = "gather"  # the same, but from scattered input elements: not worth recomputing
    REDUCTION = "reduction"  # reads the input once or more before it returns
    CALL = "call"  # stays as it is


_POINTWISE = {
    "_to_copy", "arange", "constant_pad_nd", "copy", "fill", "full", "full_like", "lift_fresh_copy", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "scalar_tensor", "select_backward", "select_scatter", "slice_backward", "slice_scatter",
    "tril", "triu", "zeros", "zeros_like",
}  # fmt: skip
_GATHER = {"cat", "embedding", "upsample_nearest2d", "upsample_nearest2d_backward"}
_REDUCTION = {
    "_batch_norm_with_update_functional", "_log_softmax", "_log_softmax_backward_data", "_native_batch_norm_legit_functional",
    "_safe_softmax", "_softmax", "_softmax_backward_data", "all", "amax", "amin", "any", "logsumexp", "mean",
    "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
    "native_layer_norm_backward", "nll_loss_backward", "nll_loss_forward", "sum", "var", "var_mean",
}  # fmt: skip
# Faster compiled than in ATen on the CPU, even if nothing fuses with them (batch norm: 2.9 against 0.34 ms).
ALONE = {
    "_native_batch_norm_legit_functional", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "var_mean",
}  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def kinds(program: Program) -> list[Kind]:
    updated = {program.graph.values[op.inputs[0]].storage for op in program.graph.ops if op.target == UPDATE_TARGET}
    return [_kind(program, op, updated) for op in program.graph.ops]


def _kind(program: Program, op: Op, updated: set[int]) -> Kind:
    call = program.calls[op.id]
    name, fits = operator_name(call.target), _fits(program, op) and _is_plain((call.args, list(call.kwargs.values())))
    if fits and is_view(program.graph, op):
        return Kind.CALL if name in ("as_strided", "") else Kind.VIEW
    if not fits or not isinstance(call.target, torch._ops.OpOverload):
        return Kind.CALL
    if name in _REDUCTION:
        return Kind.REDUCTION
    if any(program.graph.values[value].storage in updated for value in op.inputs):
        return Kind.CALL
    if name in _GATHER:
        return Kind.GATHER
    return Kind.POINTWISE if name in _POINTWISE or torch.Tag.pointwise in call.target.tags else Kind.CALL


def operator_name(target: Any) -> str:
    """The name of an ATen operator without its overload, else an empty string."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target._schema.name.split("::")[1])
    return ""


def _fits(program: Program, op: Op) -> bool:
    """Whether the op is pure, may run again, is on one device, and has no complex numbers."""
    if op.random or op.effect or op.collective or op.once:
        return False
    metas = [program.metas[value] for value in (*op.inputs, *op.outputs)]
    return len({meta.device for meta in metas}) == 1 and not any(meta.dtype.is_complex for meta in metas)


def _is_plain(argument: Any) -> bool:
    """Whether an argument can be written into a kernel's text."""
    if isinstance(argument, (list, tuple)):
        return all(map(_is_plain, argument))
    return isinstance(argument, (*_PLAIN, Ref))

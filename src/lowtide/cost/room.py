"""The memory in which operators may be measured: inside a step, what its budget leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from lowtide.cost.analytical import operand_bytes, workspace_bytes
from lowtide.cost.signature import origin_of, target_name
from lowtide.program.layouts import contiguous_strides
from lowtide.program.overwrites import overwritten_argument
from lowtide.program.program import Program, Ref

# Operators whose CPU kernels make their result twice: for every layout, or only for inputs that are not contiguous.
_MADE_TWICE, _COPIED = ("batch_norm_backward", "upsample"), ("layer_norm", "group_norm", "softmax")
_ROOM = ContextVar[Callable[[Program], int] | None]("room", default=None)


@contextlib.contextmanager
def measured_within(room_bytes: Callable[[Program], int]) -> Iterator[None]:
    """A context in which an operator is only measured if its arguments and results fit in ``room_bytes(program)``. The
    costs of others are estimated."""
    before = _ROOM.set(room_bytes)
    try:
        yield
    finally:
        _ROOM.reset(before)


def room_for(program: Program) -> int | None:
    """The bytes in which operators of ``program`` may be measured now; ``None`` if there is no limit."""
    room_bytes = _ROOM.get()
    return None if room_bytes is None else room_bytes(program)


def measured_in_bytes(program: Program, op: int) -> int:
    """The bytes that exist while an operator is measured, without its workspace."""
    call, inputs = program.calls[op], program.graph.ops[op].inputs
    position = overwritten_argument(call.target)
    copied = [call.args[position]] if position is not None else []
    made = {origin_of(program, value) for value in inputs}
    return (
        operand_bytes(program, op)
        + sum(program.metas[one.value].storage_bytes for one in copied if isinstance(one, Ref))
        + sum(operand_bytes(program, producer) for producer in made if producer is not None)
    )


def unmeasured_workspace(program: Program, op: int) -> int:
    """The estimated workspace of an operator that there is no room to measure; rather too large."""
    name, metas = target_name(program.calls[op].target), program.metas
    read = [metas[value] for value in program.graph.ops[op].inputs]
    twice = (
        _MADE_TWICE if all(one.stride == contiguous_strides(one.shape) for one in read) else (*_MADE_TWICE, *_COPIED)
    )
    made = [metas[value].storage_bytes for value in program.graph.ops[op].outputs]
    return max(workspace_bytes(program, op), sum(made) if any(word in name for word in twice) else 0)

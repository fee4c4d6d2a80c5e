"""Pointwise operators whose input dies write into its memory, as eager's own in-place operators do.

A functional program returns every sum of gradients and every mask of a gradient in new memory. Where a pointwise operator
(``torch.Tag.pointwise``) reads a tensor for the last time, nothing else looks at that storage, and the result has the same
layout and type, the operator can write its result there: the same kernel over the same elements, each read before it is
written, so the results are equal to the bit. It is decided after planning, for a given schedule, and written into it
(``Compute.into``), so that simulator and checker see it. Complex tensors are left out: their division rounds differently in
place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowtide.capture.program import Program
from lowtide.ir import Compute, Costs, Free, Schedule, owned_storages
from lowtide.ir.schedule import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """An operator that writes into one of its inputs: the keyword to pass that as, or ``""`` for its first argument."""

    target: Callable[..., Any]
    keyword: str


def reuse_memory(program: Program, costs: Costs, schedule: Schedule) -> Schedule:
    """``schedule`` with every safe pointwise compute writing into an input that it reads last."""
    steps: list[Step] = []
    owned = owned_storages(program.graph)
    live: set[int] = set()
    for index, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            own = owned[step.op]
            if len(own) == 1 and own[0] not in live:
                freed = _freed_next(schedule.steps, index)
                into = next(_candidates(program, costs, step.op, own[0], freed), None)
                step = dataclasses.replace(step, into=into)
            live.update(own)
        elif isinstance(step, Free):
            live.discard(step.storage)
        steps.append(step)
    return Schedule(tuple(steps), schedule.boundary)


def _freed_next(steps: Sequence[Step], index: int) -> set[int]:
    """Storages freed before anything else runs."""
    freed: set[int] = set()
    for step in steps[index + 1 :]:
        if not isinstance(step, Free):
            break
        freed.add(step.storage)
    return freed


def _candidates(program: Program, costs: Costs, op_id: int, own: int, freed: set[int]) -> Iterator[int]:
    """Storages among ``freed`` that the result of ``op_id`` may be written into."""
    op, call, values = program.graph.ops[op_id], program.calls[op_id], program.graph.values
    if len(op.outputs) != 1 or op.random or op.effect or call.positions is not None:
        return
    meta = program.metas[op.outputs[0]]
    if meta.dtype.is_complex:
        return
    if not _fills_its_storage(meta.shape, meta.stride, meta.storage_bytes, meta.dtype.itemsize, meta.storage_offset):
        return
    for value in op.inputs:
        storage = values[value].storage
        alone = {other for other in op.inputs if values[other].storage == storage} == {value}
        same = program.metas[value] == meta and costs.storage_bytes[storage] == costs.storage_bytes[own]
        if storage in freed and alone and same and written_form(program, op_id, value) is not None:
            yield storage


def _fills_its_storage(
    shape: Sequence[int], stride: Sequence[int], storage_bytes: int, itemsize: int, offset: int
) -> bool:
    """Whether the elements are the storage, each at a place of its own."""
    elements = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size != 1 and step != elements:
            return False
        elements *= size
    return offset == 0 and elements * itemsize == storage_bytes


def written_form(program: Program, op_id: int, value: int) -> Written | None:
    """The form of ``op_id`` that writes into its input ``value``; ``None`` where there is none."""
    call = program.calls[op_id]
    forms = _forms(call.target)
    first = getattr(call.args[0], "value", None) if call.args else None
    return next((form for form in forms if form.keyword or first == value), None)


@functools.cache
def _forms(target: Callable[..., Any]) -> tuple[Written, ...]:
    """The forms of a pointwise operator that write: into a given tensor, or into the first argument.

    Generated forms are left out: they compute into new memory and copy.
    """
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return ()
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    packets = [target.overloadpacket, getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)]
    found = []
    for packet in packets:
        for name in packet.overloads() if packet is not None else ():
            overload = getattr(packet, name)
            arguments = overload._schema.arguments
            plain = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
            out = [argument.name for argument in arguments if argument.is_out]
            writes = len(out) == 1 or (not out and overload._schema.is_mutable)
            if plain == wanted and writes and torch.Tag.generated not in overload.tags:
                found.append(Written(overload, out[0] if out else ""))
    return tuple(found)

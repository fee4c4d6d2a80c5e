"""Programs of sharded models: parameters are results of a gather, and gradients go into a reduction.

Each unit (``distributed.sharded``) that is read gets a ``lowtide.all_gather`` before its first use, with a storage for
each parameter that the program reads, and a ``lowtide.reduce_scatter`` when all its gradients are final, which returns
this rank's part of them. A gather has no inputs and may run again. A reduction has an effect, so reductions run once,
in the program's order. All collectives run in the order of the schedule, which is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lowtide.errors import CaptureError
from lowtide.ir import Op, Phase, Storage, Value
from lowtide.ir.graph import GATHER_TARGET, REDUCE_TARGET
from lowtide.program.distributed.sharded import Gather, Reduce, Unit
from lowtide.program.insertions import Insertion, inserted
from lowtide.program.program import Call, Program, Ref, TensorMeta


def with_gathers(program: Program, units: Sequence[Unit], state: Sequence[torch.Tensor]) -> Program:
    """``program``, whose flat inputs begin with ``state``, with the collectives of ``units``. The units' forms are
    among ``state``.

    Raises ``CaptureError`` if a parameter itself is a result.
    """
    if not units:
        return program
    position_of = {id(tensor): position for position, tensor in enumerate(state)}
    positions = [[position_of[id(form)] for form in unit.forms] for unit in units]
    _refuse_results(program, {position for each in positions for position in each})
    found: list[Insertion] = []
    changed = program
    for add in (_gathered, _reduced):
        for unit, own in zip(units, positions, strict=True):
            changed, insertion = add(changed, unit, own)
            found += [] if insertion is None else [insertion]
    return inserted(changed, found)


def sharded_collectives(program: Program) -> Iterator[tuple[int, Gather | Reduce]]:
    """The collectives of sharded parameters in a program, by op."""
    for op, call in zip(program.graph.ops, program.calls, strict=True):
        if isinstance(call.target, (Gather, Reduce)):
            yield op.id, call.target


def unreduced_bytes(program: Program) -> int:
    """The bytes of whole gradients that a call leaves for each sharded parameter if nothing is reduced yet."""
    whole = 0
    for op, target in sharded_collectives(program):
        if isinstance(target, Reduce):
            metas = [program.metas[value] for value in program.graph.ops[op].inputs]
            whole += sum(math.prod(meta.shape) * (target.kept_dtype or meta.dtype).itemsize for meta in metas)
    return whole


def _refuse_results(program: Program, sharded: set[int]) -> None:
    storages = {program.graph.values[value].storage for i in sharded if (value := program.inputs[i]) is not None}
    returned = {program.graph.values[value].storage for value in program.graph.forward_outputs}
    if storages & returned or any(result.argument in sharded for result in program.results):
        raise CaptureError(
            "the model returns a parameter that is sharded (or a view of one), which is there only inside of its passes. "
            "Return a copy (clone())."
        )


def _gathered(program: Program, unit: Unit, positions: Sequence[int]) -> tuple[Program, Insertion | None]:
    """The program with the unit's parameters as results of a gather before the first operator that reads one."""
    graph = program.graph
    values = {index: value for index, at in enumerate(positions) if (value := program.inputs[at]) is not None}
    storages = {graph.values[value].storage: index for index, value in values.items()}
    first = next((op for op in graph.ops if any(graph.values[v].storage in storages for v in op.inputs)), None)
    if first is None:
        return program, None
    made = tuple(values.values())
    bytes_of = {
        storage: unit.padded_elements(index) * program.metas[values[index]].dtype.itemsize
        for storage, index in storages.items()
    }
    metas = tuple(
        replace(meta, storage_bytes=bytes_of[value.storage]) if value.storage in bytes_of else meta
        for value, meta in zip(graph.values, program.metas, strict=True)
    )
    inputs = tuple(value for value in graph.inputs if value not in made)
    flat = tuple(None if value in made else value for value in program.inputs)
    changed = replace(program, graph=replace(graph, inputs=inputs), metas=metas, inputs=flat)
    name = f"gather of {unit.name or graph.name}"
    op = Op(-1, name, GATHER_TARGET, (), made, first.phase, collective=True, module=unit.name)
    call = Call(_only(Gather(unit, tuple(values))), (), {}, tuple(range(len(made))))
    return changed, Insertion(first.id - 1, op, call, tuple(storages))


def _reduced(program: Program, unit: Unit, positions: Sequence[int]) -> tuple[Program, Insertion | None]:
    """The program with a reduction of the unit's gradients after the last operator that touches one."""
    graph = program.graph
    gradients = {
        positions.index(position): value for position, value in program.gradients if position in set(positions)
    }
    if not gradients:
        return program, None
    read = tuple(gradients[index] for index in sorted(gradients))
    storages = {graph.values[value].storage for value in read}
    touching = [op for op in graph.ops if any(graph.values[v].storage in storages for v in (*op.inputs, *op.outputs))]
    dtype, device = unit.parameters[min(gradients)].dtype, unit.forms[0].device
    elements = sum(unit.padded_elements(index) for index in gradients) // unit.ranks
    meta = TensorMeta((elements,), (1,), dtype, device, 0, elements * dtype.itemsize)
    name, value, storage = f"reduction of {unit.name or graph.name}", len(graph.values), len(graph.storages)
    changed = replace(
        graph,
        values=(*graph.values, Value(value, name, storage, None, str(dtype).removeprefix("torch."), meta.shape)),
        storages=(*graph.storages, Storage(storage, None, (value,))),
        outputs=(*(output for output in graph.outputs if output not in read), value),
    )
    left = tuple(pair for pair in program.gradients if pair[0] not in positions)
    reduced = (*program.reduced, *sorted(positions[index] for index in gradients))
    op = Op(
        -1, name, REDUCE_TARGET, read, (value,), Phase.BACKWARD, effect=True, collective=True, module=unit.name
    )  # fmt: skip
    call = Call(_only(Reduce(unit, sorted(gradients))), tuple(map(Ref, read)), {})
    result = replace(program, graph=changed, metas=(*program.metas, meta), gradients=left, reduced=reduced)
    return result, Insertion(touching[-1].id, op, call, (storage,))


def _only(operator: Gather | Reduce) -> Gather | Reduce:
    """The first operator that was made with the same arguments."""
    return operator.unit.operators.setdefault((operator.__qualname__, operator.chosen), operator)

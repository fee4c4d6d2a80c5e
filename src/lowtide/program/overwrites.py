"""Operators that write their result over an input that is not needed any more, as eager's in-place operators do.

A functional program returns every sum of gradients and every masked gradient in new memory. If a pointwise operator
(``torch.Tag.pointwise``) reads a tensor for the last time, nothing else looks at its storage, and the result has the
same layout and type, the operator can write its result there. It runs the same kernel over the same elements, and reads
each before it is written, so results are equal to the bit.

- Softmax and its gradient can do so too: they pass over a row of their first argument, and then write where they have
  read.
- Operators that add or put something into places of a tensor given by an index (``index_add``, ``scatter``) otherwise
  begin with a copy of that tensor, and so does a matrix product that is added to a matrix. If the operator also reads
  that tensor as another argument, it has to copy.
- An operator that returns a tensor with a slice replaced, the functional form of an in-place operator on a slice, then
  copies only the slice.

Which inputs these are is a property of the operator (``Op.overwrites``), known to planners, simulator and checker. A
schedule decides where one is overwritten (``Compute.into``). Complex tensors are left out: their division rounds
differently in place.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.program.items import TakingItems, taking_items
from lowtide.program.layouts import is_dense
from lowtide.program.program import Call, Program, Ref, TensorMeta
from lowtide.program.references import map_references

# Their means and sums are one element at the start of a storage for all elements.
_WIDE = {"binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"}
# Not pointwise: they may overwrite only their first argument.
_INTO_FIRST = {
    "addmm", "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
    "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "masked_scatter", "put", "scatter", "scatter_add",
    "scatter_reduce",
}  # fmt: skip
SLICES: dict[Any, Any] = {  # the operators that write into a copy
    torch.ops.aten.as_strided_scatter.default: torch.ops.aten.as_strided.default,
    torch.ops.aten.slice_scatter.default: torch.ops.aten.slice.Tensor,
    torch.ops.aten.select_scatter.default: torch.ops.aten.select.int,
    torch.ops.aten.diagonal_scatter.default: torch.ops.aten.diagonal.default,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """An operator that writes into one of its inputs: the keyword by which that is passed, or ``""`` for its first
    argument."""

    target: Callable[..., Any]
    keyword: str


def _with_slice(
    view: Callable[..., torch.Tensor], into: torch.Tensor, source: torch.Tensor, *slices: Any
) -> torch.Tensor:
    """``into``, with the slice replaced by ``source``."""
    view(into, *slices).copy_(source)
    return into


def with_overwrites(program: Program) -> Program:
    """``program`` with ``Op.overwrites`` of every operator."""
    graph = program.graph
    owned = collections.Counter(storage.base for storage in graph.storages)
    kept = {graph.values[value].storage for value in (*graph.outputs, *graph.forward_outputs)}
    free = {storage.id for storage in graph.storages if not storage.external and storage.id not in kept}
    found = [tuple(_overwritten(program, op.id, free)) if owned[op.id] == 1 else () for op in graph.ops]
    ops = tuple(dataclasses.replace(op, overwrites=values) for op, values in zip(graph.ops, found, strict=True))
    return dataclasses.replace(program, graph=dataclasses.replace(graph, ops=ops))


def _overwritten(program: Program, op_id: int, free: set[int]) -> Iterator[int]:
    """The inputs of ``op_id``, in storages among ``free``, over which its result may be written."""
    op, call, values = program.graph.ops[op_id], program.calls[op_id], program.graph.values
    if len(op.outputs) != 1 or op.random or op.effect or call.positions is not None:
        return
    meta = program.metas[op.outputs[0]]
    if meta.dtype.is_complex:
        return
    if not fills_its_storage(meta):
        return
    for value in op.inputs:
        storage = values[value].storage
        alone = {other for other in op.inputs if values[other].storage == storage} == {value}
        if (
            storage in free
            and alone
            and not _wide(program, storage)
            and written_form(program, op_id, value) is not None
        ):
            yield value


def _wide(program: Program, storage: int) -> bool:
    """Whether the storage is larger than what was requested for it."""
    base = program.graph.storages[storage].base
    target = None if base is None else program.calls[base].target
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket.__name__ in _WIDE


def fills_its_storage(meta: TensorMeta) -> bool:
    """Whether the elements fill the storage, each at a place of its own."""
    whole = meta.storage_offset == 0 and math.prod(meta.shape) * meta.dtype.itemsize == meta.storage_bytes
    return whole and is_dense(meta.shape, meta.stride)


def overwritten_argument(target: Callable[..., Any]) -> int | None:
    """The position of the argument over which a compiled kernel always writes its result; ``None`` for other
    targets."""
    return None if isinstance(target, torch._ops.OpOverload) else getattr(target, "overwrites", None)


def keeping(target: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a call's target that leaves its arguments as they are."""
    kept: Callable[..., Any] = target if overwritten_argument(target) is None else target.keeping  # type: ignore[attr-defined]
    return kept


def written_form(program: Program, op_id: int, value: int) -> Written | None:
    """The form of ``op_id`` that writes into its input ``value``; ``None`` if there is none.

    A kernel knows its argument; an operator's argument must have the layout of the result. Symbolic sizes are asked for
    that last, and only for operators with such a form: each answer restricts the calls of a family.
    """
    call = program.calls[op_id]
    position = overwritten_argument(call.target)
    if position is not None:
        return Written(call.target, "") if call.args[position] == Ref(value) else None
    form = _form(call, Ref(value))
    same = form is not None and program.metas[value] == program.metas[program.graph.ops[op_id].outputs[0]]
    return form if same else None


def _form(call: Call, argument: Ref) -> Written | None:
    """The form of an operator that writes into this argument."""
    if isinstance(call.target, TakingItems):
        form = _form(dataclasses.replace(call, target=call.target.target), argument)
        return form and Written(taking_items(form.target, call.target.count), form.keyword)
    if call.target in SLICES:
        return _slice_form(call.target) if call.args[0] == argument and not call.kwargs else None
    forms = _forms(call.target)
    first = call.args[:1] == (argument,)
    if _into_first(call.target):
        return next(iter(forms), None) if first and _times(call, argument) == 1 else None
    return next((form for form in forms if first or form.keyword), None)


def _times(call: Call, argument: Ref) -> int:
    """How often the value is an argument, also in lists of indices."""
    found = list[Ref]()
    map_references((call.args, call.kwargs), found.append)
    return found.count(argument)


def _into_first(target: Callable[..., Any]) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket.__name__ in _INTO_FIRST


@functools.cache
def _slice_form(target: Callable[..., Any]) -> Written:
    return Written(functools.partial(_with_slice, SLICES[target]), "")


@functools.cache
def _forms(target: Callable[..., Any]) -> tuple[Written, ...]:
    """The forms of an operator that write: into a given tensor, or into the first argument.

    Generated forms are left out: they compute into new memory and copy.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    if torch.Tag.pointwise not in target.tags and not _into_first(target):
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

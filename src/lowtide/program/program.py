"""A captured training program: the plain graph, and the calls and layouts that torch needs to run it.

The graph (``ir.Graph``) knows names, bytes and dependencies; this module adds, per op, the call that executes it and,
per value, the layout of the tensor. Everything after capture (cost, lowering) reads these two columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide.ir import Graph
from lowtide.program.results import GradientMask, Result


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder for a tensor argument: the id of the value to pass."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """How to run an op: ``target(*args, **kwargs)`` with every ``Ref``, nested ones too, replaced by its tensor.

    ``positions`` is ``None`` where the target returns a single tensor; otherwise it holds, for each output value of the
    op, its index in the sequence that the target returns.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Layout of a value. ``storage_bytes``: size of its whole storage. ``entries``: for a sparse tensor, the number of entries
    and whether they are coalesced."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_offset: int
    storage_bytes: int
    entries: tuple[int, bool] | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Program:
    """A captured training program.

    ``calls`` has one entry per op and ``metas`` one per value. Flat inputs are the model's parameters and buffers
    (``state_names``, each tensor once), the call's distinct tensors, and further tensors that the model holds;
    ``inputs[i]`` is the value of flat input i, or ``None`` where the program does not read it. ``constants`` are the values of
    other tensors that the model holds. ``tangents[i]`` is the forward output that the i-th ``lowtide.tangent`` op belongs to.
    ``gradients`` pairs a flat input with the value of its gradient. ``mask`` tells for which results a gradient is
    expected, and in which layout (``program.results.GradientMask``). ``kept`` are the flat inputs whose first values,
    overwritten by the forward pass, are its last forward outputs. ``updated`` are the flat inputs that their optimizer updates
    inside of the backward pass (``program.updates``), ``reduced`` those whose gradients are summed over the ranks in it
    (``distributed.gathers``): their gradients are not among ``gradients``. ``placed`` tells how the gradients of distributed
    inputs lie (``distributed.local``). ``unlinked`` are flat inputs that no result depends on differentiably, whatever hooks
    they have (a parameter under ``no_grad``) or history (a state that is detached first). ``sums``: flat inputs whose gradients
    are each a sum of so many terms, one for each use.
    """

    graph: Graph
    calls: tuple[Call, ...]
    metas: tuple[TensorMeta, ...]
    inputs: tuple[int | None, ...]
    constants: dict[int, torch.Tensor]
    tangents: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    results: tuple[Result, ...]
    mask: GradientMask
    state_names: tuple[tuple[str, ...], ...]
    parameters: int
    kept: tuple[int, ...]
    updated: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    placed: tuple[tuple[int, Any], ...] = ()
    unlinked: tuple[int, ...] = ()
    sums: tuple[tuple[int, int], ...] = ()

    def same_as(self, other: Program, held: Collection[int]) -> bool:
        """Whether both programs have the same operators, operands and results in the same order, ignoring where inputs lie
        and, where nothing is written into them, which of them share memory. ``held``: ids of tensors in the model's
        attributes; other constants were made by the forward pass, and are equal if their elements are."""
        pairs = [(tensor, other.constants.get(value)) for value, tensor in self.constants.items()]
        return (
            self.graph.without_names().with_inputs_apart() == other.graph.without_names().with_inputs_apart()
            and self._layouts() == other._layouts()
            and all(map(_same_call, self.calls, other.calls))
            and all(getattr(self, name) == getattr(other, name) for name in _COMPARED)
            and all(one is two or (id(two) not in held and _equal(one, two)) for one, two in pairs)
        )

    @property
    def kept_for_backward(self) -> tuple[int, ...]:
        """The members of ``kept`` whose first values the backward pass depends on."""
        graph = self.graph
        outputs = graph.forward_outputs[len(graph.forward_outputs) - len(self.kept) :]
        behind = {value: {number} for value, number in zip(outputs, self.kept, strict=True)}
        found = set[int]()
        for op in graph.ops if behind else ():
            numbers = set[int]().union(*(behind.get(value, ()) for value in op.inputs))
            if op.id >= graph.forward_ops:
                found |= numbers
            behind.update(dict.fromkeys(op.outputs, numbers) if numbers else {})
        return tuple(number for number in self.kept if number in found)

    def _layouts(self) -> list[TensorMeta]:
        """Return all layouts, without storage offsets of inputs: a batch sliced from a larger tensor starts anywhere in it."""
        given = {value for storage in self.graph.storages if storage.external for value in storage.values}
        return [
            replace(meta, storage_offset=0, storage_bytes=0) if value in given else meta
            for value, meta in enumerate(self.metas)
        ]


_COMPARED = ("inputs", "tangents", "gradients", "results", "mask", "state_names", "kept", "placed", "unlinked")


def _same_call(one: Call, other: Call) -> bool:
    return (
        one.target is other.target
        and one.positions == other.positions
        and repr((one.args, one.kwargs)) == repr((other.args, other.kwargs))
    )


def _equal(one: torch.Tensor, two: torch.Tensor | None) -> bool:
    return two is not None and (one.dtype, one.stride()) == (two.dtype, two.stride()) and torch.equal(one, two)

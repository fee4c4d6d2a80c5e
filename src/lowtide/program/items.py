"""Numbers that a forward pass reads from computed tensors (``x.max().item()``) and that it returns, or that operators
take.

A read makes a tensor of one element, which holds the number as long as it is needed. An operator that takes the number,
or a number that Python code computes from it, also reads that tensor, after its own arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lowtide.program import targets
from lowtide.program.program import Call, Program, Ref
from lowtide.program.references import map_leaves
from lowtide.program.scalars import SCALARS, FloatScalar, IntScalar, Operations, result_of


class TensorNumber(NamedTuple):
    """The number that the forward pass reads from a tensor, the ``place``-th that it reads."""

    place: int


_KINDS: dict[type, type] = {FloatScalar: float, IntScalar: int}


@dataclass(frozen=True, slots=True)
class Item:
    """What operations make of the number of a one-element tensor."""

    operations: Operations = ()

    def __call__(self, tensor: torch.Tensor) -> Any:
        return result_of(self.operations, tensor.item())


@dataclass(frozen=True, slots=True)
class _Place:
    """A place among an operator's arguments for the number of the tensor ``behind`` them (by position). ``shown``: a
    value that the number may have."""

    behind: int
    item: Item
    shown: Any


@dataclass(frozen=True, slots=True)
class TakingItems:
    """An operator with the numbers of the last ``count`` arguments put in their places."""

    target: Callable[..., Any]
    count: int

    @property
    def __name__(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = args[-self.count :]
        return self._called(args, kwargs, lambda place: place.item(tensors[place.behind]))

    def rehearsal(self) -> Callable[..., Any]:
        """A call that takes as long, with numbers that are valid for Python's computations."""
        return lambda *args, **kwargs: self._called(args, kwargs, lambda place: place.shown)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: Callable[[_Place], Any]) -> Any:
        own, kwargs = map_leaves((args[: -self.count], kwargs), _Place, number)
        return self.target(*own, **kwargs)


@functools.cache  # one object for each, since operators are compared by identity
def taking_items(target: Callable[..., Any], count: int) -> TakingItems:
    return TakingItems(target, count)


def with_items(program: Program) -> Program:
    """The program in which operators that take the number of a tensor read the tensor instead of the number in the
    trace."""
    made = {
        call.args[1]: op.outputs[0]
        for op, call in zip(program.graph.ops, program.calls, strict=True)
        if call.target is targets.read_number
    }
    ops, calls = [], []
    for op, call in zip(program.graph.ops, program.calls, strict=True):
        taking, read = _with_places(call, made)
        calls.append(taking)
        ops.append(replace(op, inputs=tuple(dict.fromkeys((*op.inputs, *read)))) if read else op)
    return replace(program, graph=replace(program.graph, ops=tuple(ops)), calls=tuple(calls))


def _with_places(call: Call, made: dict[int, int]) -> tuple[Call, list[int]]:
    """The call with places for numbers, and the values whose numbers it takes."""
    read: list[int] = []

    def place(scalar: Any) -> Any:
        number, operations = scalar.source
        if not isinstance(number, TensorNumber):
            return scalar
        value = made[number.place]
        if value not in read:
            read.append(value)
        return _Place(read.index(value), Item(operations), _KINDS[type(scalar)](scalar))

    args, kwargs = map_leaves((call.args, call.kwargs), SCALARS, place)
    if not read:
        return call, read
    target = taking_items(call.target, len(read))
    return replace(call, target=target, args=(*args, *map(Ref, read)), kwargs=kwargs), read

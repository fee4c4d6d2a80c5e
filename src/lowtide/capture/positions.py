"""Numbers that say where in a tensor something lies, while a model is traced with stand-ins for them: ``bank[n]``,
``bank[n : n + 8]``.

A number that moves along a dimension leaves the program as it is, for as long as what it points at lies inside of the tensor
and is as long as before. Both are asked of it, as what it is compared with is; where they are not so, it makes another program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide.capture.python_state.guards.compared import StandIn
from lowtide.program.scalars import Operations

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


def stands_in(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call indexes a tensor by stand-ins."""
    return function in (_GET, _SET) and any(
        type(one) is StandIn
        for item in _items(args[1])
        for one in ((item.start, item.stop) if isinstance(item, slice) else (item,))
    )


def with_positions(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A call that indexes a tensor, with numbers in the place of stand-ins; any other one as it is."""
    if function not in (_GET, _SET):
        return function, args
    tensor, index, *values = args
    items = _items(index)
    placed = tuple(_placed(item, size) for item, size in zip(items, _sizes(tensor, items), strict=True))
    return function, (tensor, placed if type(index) is tuple else placed[0], *(_filled(tensor, one) for one in values))


def with_places(
    function: Callable[..., Any], args: Sequence[Any], read: Callable[[torch.Tensor], StandIn | None]
) -> Sequence[Any]:
    """The arguments of a call, of one that indexes a tensor with what is ``read``, if it is, of tensors that are places."""
    if function not in (_GET, _SET):
        return args

    def place(one: Any) -> Any:
        number = read(one) if is_place(one) else None
        return one if number is None else number

    items = [
        slice(place(item.start), place(item.stop), item.step) if isinstance(item, slice) else place(item)
        for item in _items(args[1])
    ]
    return args[0], tuple(items) if type(args[1]) is tuple else items[0], *args[2:]


def is_place(one: Any) -> bool:
    """Whether it is a tensor of one whole number and no dimension."""
    return isinstance(one, torch.Tensor) and one.dim() == 0 and one.dtype in _WHOLE


def _items(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _sizes(tensor: torch.Tensor, items: Iterable[Any]) -> list[int]:
    """Of the dimensions that the items of an index begin at."""
    taken = [_dimensions(item) for item in items]
    rest = tensor.dim() - sum(taken)
    sizes, dimension = [], 0
    for item, count in zip(items, taken, strict=True):
        sizes.append(tensor.shape[dimension] if dimension < tensor.dim() else 0)
        dimension += rest if item is Ellipsis else count
    return sizes


def _dimensions(item: Any) -> int:
    """How many an item of an index takes."""
    if item is None or item is Ellipsis or type(item) is bool:
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _placed(item: Any, size: int) -> Any:
    """An item of an index, with the places that stand-ins in it take in a dimension of this size."""
    if type(item) is StandIn:
        return _inside((item,), 1, size)[0]
    ends = [one for one in (item.start, item.stop) if type(one) is StandIn] if isinstance(item, slice) else []
    if not ends:
        return item
    start, stop = ends[0], ends[-1]
    if len(ends) < 2 or start.comparisons is not stop.comparisons or item.step not in (None, 1):
        raise start.misused()
    if _without_sums(start.operations) != _without_sums(stop.operations):
        raise start.misused()  # of another length for another number
    return slice(*_inside(ends, stop.value - start.value, size))


def _without_sums(operations: Operations) -> Operations:
    """What comes before the last ones that only add."""
    while operations and operations[-1].function in (operator.add, operator.sub) and type(operations[-1].other) is int:
        if operations[-1].reflected and operations[-1].function is operator.sub:
            break
        operations = operations[:-1]
    return operations


def _inside(ends: Sequence[StandIn], length: int, size: int) -> list[int]:
    """The places that ends of so many elements take, which have to lie inside of a dimension."""
    start = ends[0]
    if start.kind is not int or type(size) is not int or length < 1 or start.comparisons.number is None:
        raise start.misused()
    if not start.is_within(size - length):
        raise start.misused()
    taken = start.comparisons.take_at([(one.value, one.operations) for one in ends], size - length)
    if taken is None:
        raise start.misused()
    return taken


def _filled(tensor: torch.Tensor, value: Any) -> Any:
    """What is put into a tensor, a tensor where a stand-in is."""
    if type(value) is not StandIn:
        return value
    return torch.full((), value.taken(()), dtype=tensor.dtype, device=tensor.device)

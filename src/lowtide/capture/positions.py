"""Numbers that are positions in a tensor (``bank[n]``, ``bank[n : n + 8]``), while a model is traced with stand-ins for
them.

The program does not depend on such a number as long as it points inside the tensor, and a slice keeps its length. Both
become conditions on the number, like comparisons in the user's code; if they do not hold, the program is another one. A
slice whose length depends on the number cannot be traced, unless a single value is written into it: then the value goes
where the slice's elements are, selected among all elements along the dimension.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide.capture.python_state.guards.compared import StandIn
from lowtide.program.scalars import Operation, Operations

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)


def stands_in(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call indexes a tensor with stand-ins."""
    return function in (_GET, _SET) and any(map(_ends, _items(args[1])))


def with_positions(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A call that indexes a tensor, with numbers in place of stand-ins; other calls unchanged."""
    if function not in (_GET, _SET):
        return function, args
    tensor, index, *values = args
    items = _items(index)
    stand_ins = [one for item in items for one in _ends(item)]
    if stand_ins and not all(map(_is_known, items)):
        raise stand_ins[0].misused()
    if function == _SET and any(map(_is_loose, items)):
        return torch.Tensor.masked_fill_, _elements(tensor, items, values[0])
    placed = tuple(_placed(item, size) for item, size in zip(items, _sizes(tensor, items), strict=True))
    return function, (tensor, placed if type(index) is tuple else placed[0], *(_filled(tensor, one) for one in values))


def with_places(
    function: Callable[..., Any], args: Sequence[Any], read: Callable[[torch.Tensor], StandIn | None]
) -> Sequence[Any]:
    """The arguments of a call. If it indexes a tensor by tensors that are positions, ``read`` gives what stands for
    these."""
    if function not in (_GET, _SET):
        return args

    def end(one: Any) -> Any:
        number = read(one) if is_whole(one) else None
        return one if number is None else number

    def place(one: Any) -> Any:
        return end(one) if is_place(one) else one

    items = [
        slice(end(item.start), end(item.stop), item.step) if isinstance(item, slice) else place(item)
        for item in _items(args[1])
    ]
    return args[0], tuple(items) if type(args[1]) is tuple else items[0], *args[2:]


def is_place(one: Any) -> bool:
    """Whether the value is a tensor of one whole number and without dimensions."""
    return is_whole(one) and one.dim() == 0


def is_whole(one: Any) -> bool:
    """Whether the value is a tensor of one whole number; a slice may end there."""
    return isinstance(one, torch.Tensor) and one.numel() == 1 and one.dtype in _WHOLE


def _ends(item: Any) -> list[StandIn]:
    """The stand-ins in an item of an index: the item itself, or the bounds of a slice."""
    return [one for one in ((item.start, item.stop) if isinstance(item, slice) else (item,)) if type(one) is StandIn]


def _is_known(item: Any) -> bool:
    """Whether it is known how many dimensions an item of an index takes."""
    return (
        item is None or item is Ellipsis or type(item) in (bool, int, slice, StandIn) or isinstance(item, torch.Tensor)
    )


def _items(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _sizes(tensor: torch.Tensor, items: Iterable[Any]) -> list[int]:
    """The sizes of the dimensions at which the items of an index begin."""
    taken = [_dimensions(item) for item in items]
    rest = tensor.dim() - sum(taken)
    sizes, dimension = [], 0
    for item, count in zip(items, taken, strict=True):
        sizes.append(tensor.shape[dimension] if dimension < tensor.dim() else 0)
        dimension += rest if item is Ellipsis else count
    return sizes


def _dimensions(item: Any) -> int:
    """How many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or type(item) is bool:
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _is_loose(item: Any) -> bool:
    """Whether the item is a slice whose length depends on the number."""
    ends = _ends(item)
    if not isinstance(item, slice) or not ends:
        return False
    start, stop = ends[0], ends[-1]
    alike = len(ends) == 2 and start.comparisons is stop.comparisons
    return not (alike and _without_sums(start.operations) == _without_sums(stop.operations))


def _elements(tensor: torch.Tensor, items: Sequence[Any], value: Any) -> tuple[torch.Tensor, ...]:
    """For a value that is written into loose slices of a tensor: the index without their bounds, a mask of the slices'
    elements, and the value."""
    first = next(one for item in items for one in _ends(item))
    single = type(value) in (bool, int, float, StandIn) or (
        isinstance(value, torch.Tensor) and value.dim() == 0 and not value.requires_grad
    )
    if not single or not all(one is None or one is Ellipsis or type(one) in (int, slice, StandIn) for one in items):
        raise first.misused()
    whole = [slice(None) if _is_loose(item) else item for item in items]
    function, args = with_positions(_GET, (tensor, tuple(whole)))
    view, dimension = function(*args), 0
    rest = tensor.dim() - sum(map(_dimensions, items))
    chosen = torch.ones((), dtype=torch.bool, device=view.device)
    for item in items:
        if _is_loose(item):
            among = _among(item, view.shape[dimension], view.device)
            chosen = chosen & among.view(-1, *[1] * (view.dim() - dimension - 1))
        dimension += rest if item is Ellipsis else isinstance(item, slice) or item is None
    return view, chosen, _filled(tensor, value)


def _among(item: slice, size: int, device: torch.device) -> torch.Tensor:
    """A mask of the positions along a dimension of this size that are in a slice."""
    among, places = torch.ones(size, dtype=torch.bool, device=device), torch.arange(size, device=device)
    for end, compare in ((item.start, torch.ge), (item.stop, torch.lt)):
        if type(end) is StandIn:
            if item.step not in (None, 1) or end.kind is not int or type(size) is not int or not end.is_at_least(0):
                raise end.misused()
            among = among & compare(places, end.taken(()))
        elif end is not None:
            among = among & compare(places, end if end >= 0 else end + size)
    return among


def _placed(item: Any, size: int) -> Any:
    """An item of an index with the positions that its stand-ins have in a dimension of this size."""
    if type(item) is StandIn:
        return _inside((item,), 1, size)[0]
    ends = _ends(item)
    if not ends:
        return item
    if _is_loose(item) or item.step not in (None, 1):
        raise ends[0].misused()
    return slice(*_inside(ends, ends[1].value - ends[0].value, size))


def _without_sums(operations: Operations) -> Operations:
    """The operations before the last ones that only add, and for the last of these whether it subtracts from a
    number."""
    while operations and operations[-1].function in (operator.add, operator.sub) and type(operations[-1].other) is int:
        if operations[-1].reflected and operations[-1].function is operator.sub:
            return *operations[:-1], Operation(operator.neg)
        operations = operations[:-1]
    return operations


def _inside(ends: Sequence[StandIn], length: int, size: int) -> list[int]:
    """The positions of the ends of a slice of ``length`` elements, which must lie inside the dimension."""
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
    """The value that is written into a tensor, as a tensor if it is a stand-in."""
    if isinstance(value, torch.Tensor):
        return value
    number = value.taken(()) if type(value) is StandIn else value
    return torch.full((), number, dtype=tensor.dtype, device=tensor.device)

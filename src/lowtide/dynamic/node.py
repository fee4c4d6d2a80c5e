"""What a live run remembers of a storage, and of the operator call that can compute it again."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic.operators import Operator
from lowtide.eviction import Entry
from lowtide.program.generators import Draw

storage_of = torch._C.TensorBase.untyped_storage  # as it was, whatever ``torch.Tensor`` says while a context is active
_SERIAL = itertools.count()
_FEW = 32  # operators that would have to run
AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
current_node = torch._C._current_autograd_node
WRITTEN = -1  # the place of a result that an operator wrote into an argument


class Origin(IntEnum):
    """Which part of the program computed something. ``BACKWARD``: a backward pass that is not differentiated itself, so what it
    computes is soon used and gone; ``GRADIENT``: what such passes leave behind, the gradient of a leaf."""

    FORWARD = 0
    BACKWARD = 1
    GRADIENT = 2


def origin_of(node: Any) -> Origin:
    """Of what is computed inside this node of autograd's, or outside of any."""
    if isinstance(node, AccumulateGrad):
        return Origin.GRADIENT
    return Origin.FORWARD if node is None or torch.is_grad_enabled() else Origin.BACKWARD


class Node(Entry):
    """One version of one storage.

    Writing into a storage makes a new version, which takes the storage over; of the old one only ``call`` remains, and
    where it is wanted again it is computed into a storage of its own, ``kept``. ``handle`` is dead or ``None`` where the
    program holds no tensor of this version. A node without a ``call``, a *constant*, can not be computed again and is never
    evicted; nor is one whose address something outside the operators may hold, which is ``pinned``.
    """

    __slots__ = (
        "address", "call", "handle", "kept", "number", "opaque", "origin", "place", "serial", "size_bytes", "writers",
    )  # fmt: skip

    parents: tuple[Node, ...]
    children: dict[Node, None]  # type: ignore[assignment]

    def __init__(self, size_bytes: int, parents: tuple[Node, ...] = ()) -> None:
        super().__init__(size_bytes, 0, parents)
        self.size_bytes = size_bytes
        self.serial = next(_SERIAL)  # later than all parents
        self.number = self.serial  # of the storage: all its versions have it
        self.call: OperatorCall | None = None
        self.place = 0  # among the results of the call
        self.handle: Handle | None = None
        self.address = 0
        self.kept: UntypedStorage | None = None
        self.opaque = False  # what reads it can not be run again: its tensors are more than a strided view of bytes
        self.origin = Origin.FORWARD
        self.writers = 0  # how many others may write to it unseen

    @staticmethod
    def constant(size_bytes: int = 0) -> Node:
        """A node that is there and can not be computed again. The pool counts no bytes of it."""
        node = Node(0)
        node.size_bytes = size_bytes
        node.pinned = node.resident = True
        return node

    def held_storage(self) -> UntypedStorage | None:
        """The storage of this version that the program holds."""
        return None if self.handle is None else self.handle()

    def storage(self) -> UntypedStorage | None:
        """The storage that is or will be filled with this version, if anybody holds one."""
        return self.held_storage() if self.kept is None else self.kept

    def end_writer(self) -> None:
        """One of those that could write to it is gone."""
        self.writers -= 1

    def held(self) -> Callable[[], None]:
        """It stays until what is returned is called."""
        self.locks += 1
        return self._end_hold

    def _end_hold(self) -> None:
        self.locks -= 1

    def alive(self) -> bool:
        """Whether the program holds a tensor of this version, and not only the engine."""
        if self.handle is None or self.handle() is None:
            return False
        return self.kept is None or torch._C._storage_Use_Count(self.address) > 1

    def held_dependents(self) -> list[Node] | None:
        """What was computed from its contents and the program holds; ``None`` where any of it was evicted, or is needed by an
        operator under way."""
        found = []
        for one in _dependents(self):
            if one.alive():
                if one.locks or not one.resident:
                    return None
                found.append(one)
        return found


class Handle(weakref.ref[UntypedStorage]):
    """Tells, by way of its callback, that nobody holds the storage any more."""

    __slots__ = ("node",)

    node: Node


class OperatorCall:
    """An operator call that can be made again: ``args`` and ``kwargs`` with ``View``s in place of tensors.

    ``draw``: where the generator stood before a random call. ``grad``: whether gradients were enabled, which a few
    kernels ask. ``results``: the nodes that the call computed, by the place of the tensor among its results. ``holds``: the
    storages of constants that it reads.
    """

    __slots__ = ("args", "draw", "grad", "holds", "kwargs", "operator", "results")

    def __init__(self, operator: Operator, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.draw: Draw | None = None
        self.grad = torch.is_grad_enabled()
        self.results: dict[int, Node] = {}
        self.holds: list[UntypedStorage] = []

    def forget_result(self, node: Node) -> None:
        """The node is not computed by this call any more; a call without results lets go of what it reads."""
        self.results.pop(node.place, None)
        if not self.results:
            self.holds = []


class View:
    """A tensor by what it is a view of: which bytes of which storage, and how they are read."""

    __slots__ = ("conjugate", "dtype", "negative", "node", "offset", "size", "stride")

    def __init__(self, node: Node, tensor: Tensor) -> None:
        self.node = node
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conjugate = tensor.is_conj()
        self.negative = tensor.is_neg()

    def of(self, storage: UntypedStorage) -> Tensor:
        """The same view of another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negative else tensor


def is_opaque(tensor: Tensor) -> bool:
    """Whether it is more than a strided view of bytes."""
    return tensor.is_quantized or tensor.is_nested


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def any_evicted(nodes: Iterable[Node]) -> bool:
    """Whether one of them is gone."""
    for node in nodes:  # noqa: SIM110 (before every operator; a generator would take twice the time)
        if node.evicted:
            return True
    return False


def dependents_of(node: Node) -> list[Node]:
    """What was computed from the node's contents: through what the program released, up to what it holds."""
    return list(_dependents(node))


def _dependents(node: Node) -> Iterator[Node]:
    seen = set[Node]()
    waiting = [node]
    while waiting:
        for child in waiting.pop().children:
            if child not in seen:
                seen.add(child)
                yield child
                if not child.alive():
                    waiting.append(child)


def _may_go(latest: Origin, quickly: bool, entry: Entry) -> bool:
    return entry.origin <= latest and (not quickly or _is_quickly_rebuilt(entry))  # type: ignore[attr-defined]


def _is_quickly_rebuilt(entry: Entry) -> bool:
    """Whether few operators would have to run to have the entry back."""
    gone = [entry]
    seen = {entry}
    for one in gone:
        missing = [parent for parent in one.parents if not parent.resident and parent not in seen]
        seen.update(missing)
        gone.extend(missing)
        if len(gone) > _FEW:
            return False
    return True


# What goes first, whatever the scores: what was computed by this part of the program or one before it and, where that is asked
# for, can be rebuilt quickly. What a backward pass computes lies behind ever more of the forward pass the longer it waits;
# gradients, which an optimizer will read, lie behind all of both.
PREFERENCES = (
    functools.partial(_may_go, Origin.FORWARD, True),
    functools.partial(_may_go, Origin.BACKWARD, True),
    functools.partial(_may_go, Origin.FORWARD, False),
    functools.partial(_may_go, Origin.GRADIENT, True),
    functools.partial(_may_go, Origin.GRADIENT, False),
)


def blank(tensor: Tensor) -> Tensor:
    """A tensor without memory of the same shape, strides and type."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with lists in place of lists and tuples, and ``function`` of everything else."""
    if isinstance(value, (list, tuple)):
        return [mapped(function, item) for item in value]
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """What is in lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def tensors_of(value: Any) -> Sequence[Tensor]:
    """The tensors in lists and tuples."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, (list, tuple)):
        return ()
    found: list[Tensor] = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(tensors_of(item))
    return found


def views_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[View]:
    """The views among recorded arguments."""
    return [leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, View)]

"""Nodes (versions of storages) of an online run, and the recorded operator calls that can recompute them."""

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

storage_of = torch._C.TensorBase.untyped_storage  # unpatched, unlike ``torch.Tensor``'s while a context is active
_SERIAL = itertools.count()
_FEW = 32  # most operators of a quick rebuild
AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
current_node = torch._C._current_autograd_node
WRITTEN = -1  # ``place`` of a result written in place into an argument


class Origin(IntEnum):
    """The part of the program that computed a storage. ``BACKWARD``: a backward pass that is not itself differentiated, so its
    results are soon used and released; ``GRADIENT``: the gradient of a leaf, which outlives such a pass."""

    FORWARD = 0
    BACKWARD = 1
    GRADIENT = 2


def origin_of(node: Any) -> Origin:
    """Return the origin of results computed inside this autograd node, or outside of any (``None``)."""
    if isinstance(node, AccumulateGrad):
        return Origin.GRADIENT
    return Origin.FORWARD if node is None or torch.is_grad_enabled() else Origin.BACKWARD


class Node(Entry):
    """One version of one storage.

    Writing into a storage makes a new version, which takes over the storage. Of the old version only ``call`` remains; if it
    is needed again, it is recomputed into a storage of its own, ``kept``. ``handle`` is dead or ``None`` if the program
    holds no tensor of this version. A node without a ``call``, a *constant*, cannot be recomputed and is never evicted; nor
    is a ``pinned`` node, whose address something outside the operators may hold.
    """

    __slots__ = (
        "address", "call", "handle", "kept", "number", "opaque", "origin", "place", "serial", "size_bytes", "writers",
    )  # fmt: skip

    parents: tuple[Node, ...]
    children: dict[Node, None]  # type: ignore[assignment]

    def __init__(self, size_bytes: int, parents: tuple[Node, ...] = ()) -> None:
        super().__init__(size_bytes, 0, parents)
        self.size_bytes = size_bytes
        self.serial = next(_SERIAL)  # greater than those of all parents
        self.number = self.serial  # identifies the storage: shared by all its versions
        self.call: OperatorCall | None = None
        self.place = 0  # index among the results of the call
        self.handle: Handle | None = None
        self.address = 0
        self.kept: UntypedStorage | None = None
        self.opaque = False  # its tensors are not plain strided views, so calls that read it cannot be repeated
        self.origin = Origin.FORWARD
        self.writers = 0  # how many outside holders may write to it unseen

    @staticmethod
    def constant(size_bytes: int = 0) -> Node:
        """Create a resident node that cannot be recomputed. Its bytes are not counted in the pool."""
        node = Node(0)
        node.size_bytes = size_bytes
        node.pinned = node.resident = True
        return node

    def held_storage(self) -> UntypedStorage | None:
        """The storage in which the program holds this version, or ``None``."""
        return None if self.handle is None else self.handle()

    def storage(self) -> UntypedStorage | None:
        """The storage of this version, filled or evicted, held by the program or ``kept``; ``None`` if there is none."""
        return self.held_storage() if self.kept is None else self.kept

    def end_writer(self) -> None:
        """Note that one outside holder that could write to it is gone."""
        self.writers -= 1

    def held(self) -> Callable[[], None]:
        """Lock the node until the returned callback is called."""
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
        """Return the dependents that the program holds; ``None`` if any of them is evicted or locked by a running
        operator."""
        found = []
        for one in _dependents(self):
            if one.alive():
                if one.locks or not one.resident:
                    return None
                found.append(one)
        return found


class Handle(weakref.ref[UntypedStorage]):
    """Weak reference to a storage, whose callback reports that the storage was freed."""

    __slots__ = ("node",)

    node: Node


class OperatorCall:
    """A recorded operator call that can be run again: ``args`` and ``kwargs`` with ``View``s in place of tensors.

    ``draw``: the generator's state before a random call. ``grad``: whether gradients were enabled, which a few kernels
    depend on. ``results``: the nodes that the call computed, by the index of the tensor among its results. ``holds``: the
    storages of the constants that it reads, kept alive.
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
        """Remove the node from the call's results; a call without results releases the constants that it holds."""
        self.results.pop(node.place, None)
        if not self.results:
            self.holds = []


class View:
    """A tensor described by its node and layout, without holding its storage."""

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
    """Whether the tensor is more than a strided view of bytes: quantized or nested."""
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
    """Whether any of the nodes is evicted."""
    for node in nodes:  # noqa: SIM110 (before every operator; a generator would take twice the time)
        if node.evicted:
            return True
    return False


def dependents_of(node: Node) -> list[Node]:
    """Return the nodes computed from this one: transitively through those the program released, up to those it holds."""
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
    """Whether at most ``_FEW`` operators would have to run to rebuild the entry."""
    gone = [entry]
    seen = {entry}
    for one in gone:
        missing = [parent for parent in one.parents if not parent.resident and parent not in seen]
        seen.update(missing)
        gone.extend(missing)
        if len(gone) > _FEW:
            return False
    return True


# Filters on victims, tried in this order before scores: entries of this origin or an earlier one and, where ``quickly`` is set,
# only those quick to rebuild. Rebuilding results of a backward pass takes ever more of the forward pass the longer they wait;
# rebuilding gradients, which an optimizer will read, takes all of both.
PREFERENCES = (
    functools.partial(_may_go, Origin.FORWARD, True),
    functools.partial(_may_go, Origin.BACKWARD, True),
    functools.partial(_may_go, Origin.FORWARD, False),
    functools.partial(_may_go, Origin.GRADIENT, True),
    functools.partial(_may_go, Origin.GRADIENT, False),
)


def blank(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, strides and type."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to every leaf of nested lists and tuples; tuples become lists."""
    if isinstance(value, (list, tuple)):
        return [mapped(function, item) for item in value]
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def tensors_of(value: Any) -> Sequence[Tensor]:
    """Return the tensors in nested lists and tuples."""
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

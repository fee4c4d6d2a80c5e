"""Hashable keys of arguments, results and attributes: two values with equal keys can use the same program.

Objects are described by their contents, whatever their ``__eq__`` does: options created anew for each call have the same key,
and options mutated since have another. Objects without inspectable content are compared as Python does.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import operator
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from lowtide.objects.structure import Changing, Computed, Derived, Nested, OpenObject, Slot, flatten
from lowtide.objects.walk import PLAIN, beside, cell_value, content, exact, fields, is_open

_LONG = 256  # longer ``bytes`` are represented by a digest
_NAMES = frozenset((str, int))
_FACTS = operator.attrgetter("shape", "dtype", "device", "requires_grad")
_STRIDED = frozenset((torch.strided,))
_IS_NESTED, _LAYOUT = operator.attrgetter("is_nested"), operator.attrgetter("layout")
_COLUMNS: tuple[Any, ...] = (_FACTS, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def fingerprint(structure: Any) -> Any:
    """The key of a structure (``objects.structure``): equal for trees that differ only in their tensors."""
    return _Visit().key(structure)


def layout(tree: Any) -> Any:
    """The key of a tree: equal for trees that differ only in the values of their tensors."""
    return layout_of(*flatten(tree))


def layout_of(tensors: Sequence[torch.Tensor], structure: Any) -> Any:
    """Compute ``layout`` of a tree that is already flattened into ``tensors`` and ``structure``."""
    return fingerprint(structure), tensor_keys(tensors)


def tensor_keys(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The keys of several tensors. Equivalent to ``tensor_key`` of each, but faster."""
    if any(map(_IS_NESTED, tensors)) or not _STRIDED.issuperset(map(_LAYOUT, tensors)):
        return tuple(map(tensor_key, tensors))
    return (*zip(*(map(column, tensors) for column in _COLUMNS), strict=True),)


def tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.is_nested:  # nested tensors have neither shape nor strides
        return ("nested",), tensor.layout
    strides: Any = tensor.layout
    if strides is torch.strided:
        strides = tensor.stride()
    elif strides is torch.sparse_coo:  # sparse tensors (compressed ones too) have no strides
        strides = (strides, tensor._nnz(), tensor.is_coalesced())
    return _FACTS(tensor), strides, tensor.is_conj(), tensor.is_neg()


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A key that compares a tensor by identity."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


class _Visit:
    """Build the key of a structure recursively. An object met again is represented by its number, so cycles end."""

    def __init__(self) -> None:
        self.met: dict[int, tuple[int, Any]] = {}

    def key(self, node: Any) -> Any:
        if isinstance(node, bytes) and len(node) > _LONG:
            return ("bytes", hashlib.sha256(node).digest())
        if isinstance(node, PLAIN) and not beside(node):
            return (type(node), exact(node))
        if isinstance(node, Slot):
            return ("tensor", node.index)
        if isinstance(node, Computed):
            return ("computed", node.key)
        if isinstance(node, Derived):
            return ("derived", node.function, self.key(node.tensor))
        if isinstance(node, Changing):
            return ("changing", node.way, node.kind)
        if isinstance(node, Nested):
            kind = node.spec.context if isinstance(node.spec.context, type) else None  # the class of a named tuple
            return (_told_of(node.spec), kind, tuple(map(self.key, node.leaves)))
        if isinstance(node, OpenObject):
            items = () if node.items is None else (self.key(node.items),)
            return (type(node.prototype), self._items(node.attributes), *items)
        if isinstance(node, torch.Tensor):
            return ("held", _Same(node), None if node.is_inference() else node._version, tensor_key(node))
        parts, more = _parts(node), beside(node)
        if not parts and not more:
            return (type(node), *_told(node))
        if id(node) in self.met:
            return ("met", self.met[id(node)][0])
        if not isinstance(node, (tuple, frozenset)):
            self.met[id(node)] = (len(self.met), node)
        return (type(node), self._items(parts), *((self._items(more),) if more else ()))

    def _items(self, parts: dict[Any, Any]) -> tuple[Any, ...]:
        return tuple((name if type(name) in _NAMES else self.key(name), self.key(part)) for name, part in parts.items())


def _told_of(spec: pytree.TreeSpec) -> Any:
    """The key of a container's pytree spec, without its children."""
    if spec.type is tuple or spec.type is list:
        return spec.type
    if spec.type is dict and all(type(name) is str for name in spec.context):
        return tuple(spec.context)
    return str(spec)


def _parts(node: Any) -> dict[Any, Any]:
    """The parts of an object by name, or an empty dictionary if it cannot be looked into."""
    if isinstance(node, dict):
        return node
    if isinstance(node, PLAIN):
        return {"": exact(node)}
    if isinstance(node, types.FunctionType):
        cells = dict(enumerate(map(cell_value, node.__closure__ or ())))
        held = {"defaults": node.__defaults__, "keywords": node.__kwdefaults__, "closure": cells}
        named = {"code": node.__code__, "variables": id(node.__globals__)}
        return {**named, **held} if cells or any(held.values()) else {}
    items = content(node)
    if items is not None:
        return dict(enumerate(items))
    return fields(node) if is_looked_into(node) else {}


def is_looked_into(node: Any) -> bool:
    """Whether an object's key is made of its attributes."""
    return is_open(node) and not _is_closed(type(node))


def _told(node: Any) -> tuple[Any, ...]:
    """The key of an object without inspectable content: the object, its ``repr``, or both. Equal objects may differ in their
    ``repr`` (``Decimal``)."""
    if not _is_hashable(node):
        return (repr(node),)
    return (node, repr(node)) if getattr(type(node), "__eq__", None) is not object.__eq__ else (node,)


def _is_closed(kind: type) -> bool:
    """Whether objects of the type are compared as Python does, not by attributes: enum members and objects of the standard
    library (loggers, locks), except namespaces."""
    root = str(kind.__module__).partition(".")[0]
    return issubclass(kind, enum.Enum) or (root in sys.stdlib_module_names and kind not in _NAMESPACES)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True

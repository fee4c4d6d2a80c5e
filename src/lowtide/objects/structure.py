"""Flatten nested arguments and results into tensors and a structure, and rebuild them with the same types.

``torch.utils._pytree`` handles lists, tuples and dictionaries. This module adds dataclasses and plain objects that hold tensors
(such as key-value caches) and subclasses of containers, by copying their contents. It also handles classes registered with
pytree itself, because their flatten functions may drop part of an object's state.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from lowtide.objects.clones import copied, empty, fill, has_more, items_of
from lowtide.objects.walk import CLOSED, CONTAINERS, PLAIN, fields

_PLAIN, _NAMES = frozenset(PLAIN), frozenset((str,))
Way = tuple[Any, ...]  # a path in a tree: keys, indices and attribute names


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor at ``index`` in the flat list."""

    index: int


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object that holds tensors: a tensor-free prototype, the structures of its attributes and, for a container, that of
    its ``items`` as a built-in list, tuple or dict."""

    prototype: Any
    attributes: dict[str, Any]
    items: Any = None


@dataclass(frozen=True, slots=True)
class Nested:
    """A container that pytree can flatten: its spec and the structures of its children."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """Stands for the object at ``index`` in the list of objects from the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Stands for a plain value that ``unflatten`` computes by calling ``compute``. Its ``key`` identifies it."""

    key: Any
    compute: Callable[[], Any] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Derived:
    """Stands for a plain value that ``function`` computes from a tensor."""

    function: Callable[[Any], Any]
    tensor: Any


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A back reference to the enclosing object at ``level``, counted from the top (batches and their stores refer to each
    other). ``weak``: it is a weak reference."""

    level: int
    weak: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Changing:
    """Stands for a plain value of type ``kind`` that changes from call to call. ``values[way]`` is its current value."""

    values: dict[Way, Any]
    way: Way
    kind: type

    @property
    def value(self) -> Any:
        return self.values[self.way]

    @property
    def text(self) -> str:
        """The value's name for messages: its argument and the keys inside it."""
        first, *rest = self.way
        return f"the argument {first}{''.join(f'[{key!r}]' for key in rest)}"


# By type: a function from a value to the tensor it derives from and the deriving function, or ``None`` for a plain value.
DERIVED: dict[type, Callable[[Any], tuple[torch.Tensor, Callable[[Any], Any]] | None]] = {}


def flatten(tree: Any, known: Sequence[torch.Tensor] = ()) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in ``tree``, one entry per occurrence, and the structure for ``unflatten``. Its slots count from
    ``len(known)``: the ``known`` tensors are assumed to precede those returned."""
    tensors = [*known]
    structure = _visit(tree, tensors, (), {})
    return tensors[len(known) :], structure


def _visit(node: Any, tensors: list[torch.Tensor], seen: tuple[Any, ...], bare: dict[int, Any]) -> Any:
    """Build the structure of ``node``. ``seen``: enclosing objects, outermost first. ``bare``: objects that reach no tensor."""
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return Slot(len(tensors) - 1)
    if type(node) in _PLAIN or type(node) is Changing:
        return node
    derived = _derived(node)
    if derived is not None:
        return Derived(derived[1], _visit(derived[0], tensors, seen, bare))
    around = _around(node, seen)
    if around is not None:
        wanted = seen[around.level]
        return around if _level(wanted) is None and not isinstance(wanted, tuple) else node
    if _is_closed(node):
        return node
    within, level = (*seen, node), _level(node)
    if level is not None:
        leaves, spec = level
        return Nested(spec, tuple([_visit(leaf, tensors, within, bare) for leaf in leaves]))
    if _is_bare(node, bare):
        return node
    attributes = {name: _visit(value, tensors, within, bare) for name, value in fields(node).items()}
    items = items_of(node)
    found = OpenObject(node, attributes, None if items is None else _visit(items, tensors, within, bare))
    return OpenObject(_emptied(found), attributes, found.items) if slots(found) else node


def _derived(node: Any) -> tuple[torch.Tensor, Callable[[Any], Any]] | None:
    made = DERIVED.get(type(node))
    return None if made is None else made(node)


def _around(node: Any, seen: tuple[Any, ...]) -> Ancestor | None:
    weak = type(node) is weakref.ref
    wanted = node() if weak else node
    for level, one in enumerate(seen):
        if one is wanted:
            return Ancestor(level, weak)
    return None


def _is_bare(node: Any, bare: dict[int, Any]) -> bool:
    """Whether no tensor is reachable from ``node``. Visits each object once (a logger, say, leads to all others), and adds the
    visited ones to ``bare`` if there is none."""
    seen: dict[int, Any] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor) or _derived(one) is not None:
            return False
        if not _is_closed(one) and id(one) not in seen and id(one) not in bare:
            seen[id(one)] = one
            level = _level(one)
            waiting += [*fields(one).values(), items_of(one)] if level is None else level[0]
    bare.update(seen)
    return True


def _is_closed(node: Any) -> bool:
    return isinstance(node, (*PLAIN, *CLOSED)) or getattr(type(node), "_lowtide_runtime", False)


def flatten_distinct(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """Flatten ``tree`` like ``flatten``, but list a tensor that occurs several times only once."""
    return distinct(*flatten(tree))


def distinct(
    tensors: Sequence[torch.Tensor], structure: Any, known: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], Any]:
    """Remove duplicates, and tensors in ``known``, from the result of ``flatten``. Returns the remaining tensors and the
    structure with its slots renumbered: ``known`` tensors first, then the returned ones."""
    new: list[torch.Tensor] = []
    position: dict[int, int] = {}
    for tensor in tensors:
        if id(tensor) not in position:
            same = map(operator.is_, known, itertools.repeat(tensor))
            place = next(itertools.compress(itertools.count(), same), len(known) + len(new))
            if place == len(known) + len(new):
                new.append(tensor)
            position[id(tensor)] = place
    if len(new) == len(tensors):  # slots are numbered correctly already
        return new, structure
    slots = [Slot(position[id(tensor)]) for tensor in tensors]
    return new, replaced(structure, lambda leaf: slots[leaf.index - len(known)] if isinstance(leaf, Slot) else leaf)


def unflatten(structure: Any, tensors: Sequence[Any], given: Sequence[Any] = (), within: tuple[Any, ...] = ()) -> Any:
    """Rebuild a tree from its structure: the inverse of ``flatten``. ``tensors`` fill the slots, and ``given`` (objects of the
    arguments) the ``ArgumentSlot``s. ``within``: the enclosing objects, for recursion."""
    if isinstance(structure, Slot):
        return tensors[structure.index]
    if isinstance(structure, ArgumentSlot):
        return given[structure.index]
    if isinstance(structure, Computed):
        return structure.compute()
    if isinstance(structure, Derived):
        return structure.function(unflatten(structure.tensor, tensors, given, within))
    if isinstance(structure, Ancestor):
        return weakref.ref(within[structure.level]) if structure.weak else within[structure.level]
    if isinstance(structure, Nested):
        inside = (*within, None)
        return pytree.tree_unflatten(
            [unflatten(one, tensors, given, inside) for one in structure.leaves], structure.spec
        )
    if isinstance(structure, OpenObject):
        return _formed(structure, tensors, given, within)
    return structure


def _formed(found: OpenObject, tensors: Sequence[Any], given: Sequence[Any], within: tuple[Any, ...]) -> Any:
    if isinstance(found.prototype, tuple):
        clone = empty(found.prototype, unflatten(found.items, tensors, given, (*within, None)))
    elif found.items is not None:
        clone = empty(found.prototype)
        fill(clone, unflatten(found.items, tensors, given, (*within, clone)))
    else:
        clone = copied(found.prototype)
    for name, child in found.attributes.items():
        object.__setattr__(clone, name, unflatten(child, tensors, given, (*within, clone)))
    return clone


def difference(one: Any, other: Any, key: Callable[[Any], Any]) -> tuple[Any, Any] | None:
    """The first pair of leaves that differ by ``key`` in two structures of one form, or ``None``."""
    for kind in (Nested, OpenObject):
        if isinstance(one, kind) and isinstance(other, kind):
            inside = zip(_children(one), _children(other), strict=False)
            return next((found for pair in inside if (found := difference(*pair, key))), None)
    return None if key(one) == key(other) else (one, other)


def with_argument_slots(structure: Any, objects: Sequence[Any]) -> Any:
    """A copy of the structure in which each of the objects is replaced by an ``ArgumentSlot``."""
    index_of = {id(value): index for index, value in enumerate(objects)}
    return replaced(structure, lambda leaf: ArgumentSlot(index_of[id(leaf)]) if id(leaf) in index_of else leaf)


def objects(structure: Any) -> list[Any]:
    """The leaves of a structure that are neither tensors nor plain values, in order."""
    found: list[Any] = []
    replaced(
        structure,
        lambda leaf: leaf if isinstance(leaf, (Slot, Computed, Ancestor, Changing, *PLAIN)) else found.append(leaf),
    )
    return found


def changing(structure: Any) -> list[Changing]:
    """The ``Changing`` leaves of a structure: values that differ from call to call."""
    found: list[Changing] = []
    replaced(structure, lambda leaf: found.append(leaf) if isinstance(leaf, Changing) else leaf)
    return found


def derived(structure: Any) -> list[Derived]:
    """The ``Derived`` parts of a structure: values computed from tensors."""
    found: list[Derived] = []
    replaced(structure, lambda leaf: leaf, found.append)
    return found


def replaced(structure: Any, leaf: Callable[[Any], Any], derived: Callable[[Derived], Any] | None = None) -> Any:
    """Map ``leaf`` over the leaves of a structure, slots included, and ``derived``, if given, over its ``Derived`` parts."""
    if isinstance(structure, Nested):
        return Nested(structure.spec, tuple(replaced(child, leaf, derived) for child in structure.leaves))
    if isinstance(structure, OpenObject):
        attributes = {name: replaced(child, leaf, derived) for name, child in structure.attributes.items()}
        items = None if structure.items is None else replaced(structure.items, leaf, derived)
        return OpenObject(structure.prototype, attributes, items)
    if isinstance(structure, Derived):
        return derived(structure) if derived else Derived(structure.function, replaced(structure.tensor, leaf))
    return leaf(structure)


def slots_in_objects(structure: Any) -> frozenset[int]:
    """The slots inside opaque objects, such as caches: results that are carried along rather than trained on."""
    opaque = isinstance(structure, OpenObject) and structure.items is None
    if opaque and not dataclasses.is_dataclass(structure.prototype):
        return frozenset(slots(structure))
    return frozenset().union(*map(slots_in_objects, _children(structure)))


def slots(structure: Any) -> list[int]:
    """The indices of all slots in a structure, in order."""
    if isinstance(structure, Slot):
        return [structure.index]
    return [slot for child in _children(structure) for slot in slots(child)]


def _children(structure: Any) -> Iterable[Any]:
    if isinstance(structure, OpenObject):
        return (*structure.attributes.values(), structure.items)
    if isinstance(structure, Derived):
        return (structure.tensor,)
    return structure.leaves if isinstance(structure, Nested) else ()


def items_in(node: Any) -> Iterable[Any]:
    """The children of a container that pytree can flatten, in the order of ``Nested.leaves``; empty for anything else."""
    level = _level(node)
    return () if level is None else level[0]


def _level(node: Any) -> tuple[Iterable[Any], pytree.TreeSpec] | None:
    """The children and spec of one container level (a container may hold itself), or ``None`` if pytree would lose something.
    ``is_leaf`` refers to no node: ``tree_flatten`` leaves a reference cycle behind, which must not keep tensors alive."""
    kind: Any = type(node)
    if kind is tuple or kind is list:
        return node, _spec(kind, len(node))
    if kind is dict and _NAMES.issuperset(map(type, node)):
        return node.values(), _spec(dict, tuple(node))
    is_leaf: Any = getattr(pytree, "tree_is_leaf", None) or pytree._is_leaf
    if not isinstance(node, CONTAINERS) or is_leaf(node) or has_more(node):
        return None
    answers = iter((False,))
    return pytree.tree_flatten(node, is_leaf=lambda _: next(answers, True))


@functools.lru_cache(maxsize=1024)
def _spec(kind: Any, form: int | tuple[str, ...]) -> pytree.TreeSpec:
    """The pytree spec of a tuple or list of a given length, or of a dictionary with given names."""
    return pytree.tree_structure(dict.fromkeys(form) if isinstance(form, tuple) else kind(range(form)))


def _emptied(found: OpenObject) -> Any:
    """A prototype that keeps no tensor alive: an empty container, or a copy with its tensor attributes set to ``None``."""
    if found.items is not None:
        return empty(found.prototype)
    prototype = copied(found.prototype)
    for name in (name for name, child in found.attributes.items() if slots(child)):
        object.__setattr__(prototype, name, None)
    return prototype

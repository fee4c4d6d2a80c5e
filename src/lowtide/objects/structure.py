"""Nested arguments and results taken apart into tensors, and put together again with the same types.

``torch.utils._pytree`` knows lists, tuples and dictionaries. Dataclasses and plain objects that hold tensors (key-value caches,
say) are handled here, and containers of classes of their own: a copy is made of what they hold. So are classes that are
registered there: their functions need not keep all that an object knows.
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
Way = tuple[Any, ...]  # keys, indices and names of attributes that lead to something in a tree


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor at ``index`` in the flat list."""

    index: int


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object that holds tensors: a prototype, the structures of its attributes and, if it is a container, of its ``items``
    in one of Python's own."""

    prototype: Any
    attributes: dict[str, Any]
    items: Any = None


@dataclass(frozen=True, slots=True)
class Nested:
    """A container that pytree knows."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """Stands for the object at ``index`` among those of the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Stands for a plain value that is computed where the tree is put together; told from others by its ``key``."""

    key: Any
    compute: Callable[[], Any] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Derived:
    """Stands for a plain value that a ``function`` makes of a tensor."""

    function: Callable[[Any], Any]
    tensor: Any


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Stands for the object around it that many levels from the top, as batches and their stores refer to each other; ``weak``:
    for a weak reference to it."""

    level: int
    weak: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Changing:
    """Stands for a plain value of one ``kind`` that is another one in every call: now that in ``values`` under this way."""

    values: dict[Way, Any]
    way: Way
    kind: type

    @property
    def value(self) -> Any:
        return self.values[self.way]

    @property
    def text(self) -> str:
        """How code would name it."""
        first, *rest = self.way
        return f"the argument {first}{''.join(f'[{key!r}]' for key in rest)}"


# By type: of a value of it, the tensor that it is made of and how; ``None`` where it is as plain as others.
DERIVED: dict[type, Callable[[Any], tuple[torch.Tensor, Callable[[Any], Any]] | None]] = {}


def flatten(tree: Any, known: Sequence[torch.Tensor] = ()) -> tuple[list[torch.Tensor], Any]:
    """The tensors in ``tree``, each object once per occurrence, and the structure that ``unflatten`` takes, whose slots count
    the ``known`` tensors first."""
    tensors = [*known]
    structure = _visit(tree, tensors, (), {})
    return tensors[len(known) :], structure


def _visit(node: Any, tensors: list[torch.Tensor], seen: tuple[Any, ...], bare: dict[int, Any]) -> Any:
    """``seen``: what the node is in, from the top on. ``bare``: objects that are known to lead to no tensor, by identity."""
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
    """Whether no tensor can be reached; each object is looked at once, by however many ways it is reached: a logger, say, leads
    to all others. What leads to none is added to ``bare``."""
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
    """As ``flatten``, with a tensor that occurs several times listed once."""
    return distinct(*flatten(tree))


def distinct(
    tensors: Sequence[torch.Tensor], structure: Any, known: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], Any]:
    """Each of the tensors once, but for those that are ``known``; and the structure that ``flatten`` gave for them, with the
    slots of these."""
    new: list[torch.Tensor] = []
    position: dict[int, int] = {}
    for tensor in tensors:
        if id(tensor) not in position:
            same = map(operator.is_, known, itertools.repeat(tensor))
            place = next(itertools.compress(itertools.count(), same), len(known) + len(new))
            if place == len(known) + len(new):
                new.append(tensor)
            position[id(tensor)] = place
    if len(new) == len(tensors):  # as they were counted
        return new, structure
    slots = [Slot(position[id(tensor)]) for tensor in tensors]
    return new, replaced(structure, lambda leaf: slots[leaf.index - len(known)] if isinstance(leaf, Slot) else leaf)


def unflatten(structure: Any, tensors: Sequence[Any], given: Sequence[Any] = (), within: tuple[Any, ...] = ()) -> Any:
    """The tree whose tensors are ``tensors``, and its objects from the arguments those of ``given``; inverse of ``flatten``.
    ``within``: the objects that it is in."""
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
    """The first values in two structures of one form that are no tensors and that a ``key`` tells apart."""
    for kind in (Nested, OpenObject):
        if isinstance(one, kind) and isinstance(other, kind):
            inside = zip(_children(one), _children(other), strict=False)
            return next((found for pair in inside if (found := difference(*pair, key))), None)
    return None if key(one) == key(other) else (one, other)


def with_argument_slots(structure: Any, objects: Sequence[Any]) -> Any:
    """The same structure with ``ArgumentSlot`` for each of the objects."""
    index_of = {id(value): index for index, value in enumerate(objects)}
    return replaced(structure, lambda leaf: ArgumentSlot(index_of[id(leaf)]) if id(leaf) in index_of else leaf)


def objects(structure: Any) -> list[Any]:
    """What is neither a tensor nor a plain value in it, in order."""
    found: list[Any] = []
    replaced(
        structure,
        lambda leaf: leaf if isinstance(leaf, (Slot, Computed, Ancestor, Changing, *PLAIN)) else found.append(leaf),
    )
    return found


def changing(structure: Any) -> list[Changing]:
    """The values in it that are other ones in every call."""
    found: list[Changing] = []
    replaced(structure, lambda leaf: found.append(leaf) if isinstance(leaf, Changing) else leaf)
    return found


def derived(structure: Any) -> list[Derived]:
    """What in it follows from tensors."""
    found: list[Derived] = []
    replaced(structure, lambda leaf: leaf, found.append)
    return found


def replaced(structure: Any, leaf: Callable[[Any], Any], derived: Callable[[Derived], Any] | None = None) -> Any:
    """The same structure with other leaves, slots included, and what follows from tensors, if that is asked for."""
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
    """Slots inside opaque objects (caches): results that are carried along rather than trained on."""
    opaque = isinstance(structure, OpenObject) and structure.items is None
    if opaque and not dataclasses.is_dataclass(structure.prototype):
        return frozenset(slots(structure))
    return frozenset().union(*map(slots_in_objects, _children(structure)))


def slots(structure: Any) -> list[int]:
    """The slots in it, in order."""
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
    """What is in a container that pytree knows, in the order of the ``leaves`` of its structure; nothing in anything else."""
    level = _level(node)
    return () if level is None else level[0]


def _level(node: Any) -> tuple[Iterable[Any], pytree.TreeSpec] | None:
    """The children of a container, itself among them, perhaps; ``None`` for what is none, or has more to it. ``tree_flatten``
    leaves a reference cycle behind, which must not hold the tensors: so it is the first one asked for that is no leaf."""
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
    """Of a tuple or list of this length, or a dictionary with these names."""
    return pytree.tree_structure(dict.fromkeys(form) if isinstance(form, tuple) else kind(range(form)))


def _emptied(found: OpenObject) -> Any:
    """A prototype that keeps no tensor alive."""
    if found.items is not None:
        return empty(found.prototype)
    prototype = copied(found.prototype)
    for name in (name for name, child in found.attributes.items() if slots(child)):
        object.__setattr__(prototype, name, None)
    return prototype

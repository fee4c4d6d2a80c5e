"""Find and replace plain values in a structure (``objects.structure``) by their ways (paths of keys, indices, attributes)."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lowtide.objects.structure import Nested, OpenObject, Slot, Way, replaced
from lowtide.objects.walk import PLAIN

_PLAIN = frozenset(PLAIN)


def values_in(structure: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    """Yield ``(way, value)`` for every leaf that is not a tensor in the structure of ``(args, kwargs)``. A way begins with the
    index or name of an argument, followed by the keys and attribute names inside it."""
    if not way:
        for arguments in structure.leaves:
            if any(type(child) is not Slot for child in arguments.leaves):
                for key, child in zip(_keys(arguments), arguments.leaves, strict=True):
                    yield from values_in(child, (key,))
        return
    if isinstance(structure, Slot):
        return
    children: Iterable[tuple[Any, Any]]
    if isinstance(structure, OpenObject) and structure.items is not None:
        attributes = ((f".{name}", child) for name, child in structure.attributes.items())
        children = (*attributes, *zip(_keys(structure.items), structure.items.leaves, strict=True))
    elif isinstance(structure, OpenObject):
        children = structure.attributes.items()
    elif isinstance(structure, Nested):
        children = zip(_keys(structure), structure.leaves, strict=True)
    else:
        yield way, structure
        return
    for key, child in children:
        if type(child) in _PLAIN:
            yield (*way, key), child
        elif type(child) is not Slot:
            yield from values_in(child, (*way, key))


def with_values(structure: Any, others: Mapping[Way, Any]) -> Any:
    """A copy of the structure in which the values at the ways in ``others`` are replaced. Ways are those of ``values_in``."""
    given = iter([others.get(way, value) for way, value in values_in(structure)])
    return replaced(structure, lambda leaf: leaf if type(leaf) is Slot else next(given))


def alike(way: Way) -> Way:
    """The way with list indices masked: equal for ways that lead to the same place in different items of lists."""
    return way[0], *(None if type(key) is int else key for key in way[1:])


def _keys(nested: Nested) -> Sequence[Any]:
    kind, context = nested.spec.type, nested.spec.context
    keys: Sequence[Any] = context if kind in (dict, OrderedDict) else range(len(nested.leaves))
    return context[1] if kind is defaultdict else keys

"""The ways to plain values in a structure (``objects.structure``), and what stands there."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lowtide.objects.structure import Nested, OpenObject, Slot, Way, replaced
from lowtide.objects.walk import PLAIN

_PLAIN = frozenset(PLAIN)


def values_in(structure: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    """What is no tensor in the structure of ``(args, kwargs)``, and by which way: the number or the name of an argument, and
    from there on."""
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
    """The same with ``others`` in the places that ``values_in`` has."""
    given = iter([others.get(way, value) for way, value in values_in(structure)])
    return replaced(structure, lambda leaf: leaf if type(leaf) is Slot else next(given))


def alike(way: Way) -> Way:
    """What ways have in common that lead to the same in other items of lists."""
    return way[0], *(None if type(key) is int else key for key in way[1:])


def _keys(nested: Nested) -> Sequence[Any]:
    kind, context = nested.spec.type, nested.spec.context
    keys: Sequence[Any] = context if kind in (dict, OrderedDict) else range(len(nested.leaves))
    return context[1] if kind is defaultdict else keys

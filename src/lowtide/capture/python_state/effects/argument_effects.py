"""What a forward pass writes into dictionaries, lists and objects among its arguments, as code does that hands a batch
from module to module (``batch["features"] = self.encoder(batch["image"])``). Planned calls write the same into their
arguments.

A trace gets copies of the arguments. What it writes there is taken out again and becomes a result. Plain values do too,
if a rehearsed call (``capture.rehearsal``) that begins like the trace writes the same.
"""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from lowtide.capture.python_state.guards.external_effects import refuse_arguments
from lowtide.objects import structure
from lowtide.objects.clones import base_of, items_of
from lowtide.objects.walk import (
    ABSENT,
    CLOSED,
    CONTAINERS,
    PLAIN,
    beside,
    content,
    exact,
    in_slots,
    is_open,
    own_attributes,
    reachable,
    refill,
)

_DICTIONARIES = (dict, OrderedDict, defaultdict)
_ARRAY = "[:]"
_TOLD = frozenset((int, float, complex, str, bytes))


@dataclass(frozen=True, slots=True)
class ArgumentWrite:
    """A write into the ``holders`` object with this number: of a value under a ``key`` or an attribute name, or, if the
    key is ``None``, of the whole content of a list. ``removed``: the key is removed instead."""

    number: int
    key: Any
    removed: bool = False

    def perform(self, holders: Sequence[Any], value: Any) -> None:
        """Write the value, bypassing the holder's class: the value is what the class has made of it."""
        holder = holders[self.number]
        if isinstance(holder, list):
            list.__setitem__(holder, slice(None), value)
            return
        items = _items(holder)
        kind = base_of(items)
        if not self.removed:
            kind.__setitem__(items, self.key, value)
        elif dict.__contains__(items, self.key):
            kind.__delitem__(items, self.key)


def holders(arguments: Any, given: Any) -> list[Any]:
    """The dictionaries, lists and objects in ``given`` that can be written. ``arguments``: the structure of
    ``given``."""
    return [*_holders(arguments, given)]


def are_distinct(given: Sequence[Any]) -> bool:
    """Whether none of these occurs twice. A trace has separate copies of it then, and a write into one would not be
    seen in the other."""
    return len({*map(id, given)}) == len(given)


def _holders(arguments: Any, given: Any) -> Iterator[Any]:
    for one in _inside(arguments, given):
        if not isinstance(one, tuple) and (isinstance(one, (list, dict)) or own_attributes(one) is not None):
            yield one


def _inside(node: Any, given: Any) -> Iterator[Any]:
    """All containers and objects in ``given`` that were taken apart."""
    if isinstance(node, structure.OpenObject):
        yield given
        for name, child in node.attributes.items():
            yield from _inside(child, object.__getattribute__(given, name))
        inside = () if node.items is None else node.items.leaves
        for child, one in zip(inside, structure.items_in(items_of(given)), strict=True):
            yield from _inside(child, one)
    elif isinstance(node, structure.Nested) and type(given) in (tuple, list, *_DICTIONARIES):
        yield given
        for child, one in zip(node.leaves, structure.items_in(given), strict=True):
            yield from _inside(child, one)


class ArgumentWrites:
    """The writes of one run into copies of its arguments, which have this structure and are ``distinct``. ``made``: the
    writes. ``values``: what was written. ``told``: see ``plain_values``."""

    def __init__(self, arguments: Any, given: Any, distinct: bool) -> None:
        self._holders = holders(arguments, given) if distinct else []
        self._before = [_copy(one) for one in self._holders]
        objects = structure.objects(arguments)
        self._first = len(objects)
        # Kinds that hold no tensors. Writes into them are refused elsewhere.
        others = [own_attributes(one) for one in objects if is_open(one) or isinstance(one, types.SimpleNamespace)]
        self._others = [(own, dict(own)) for own in others if own is not None]
        known = [(one, _reader_of_rest(one)) for one in (*_inside(arguments, given), *objects)]
        self._rest = [(one, read, read(one)) for one, read in known if read is not None]
        self.made: tuple[ArgumentWrite, ...] = ()
        self.values: tuple[Any, ...] = ()
        self.told: dict[Any, Any] = {}

    def take(self, model: nn.Module, result: Any) -> Any:
        """The ``result`` of the run, with slots for the holders, which get their former content back. If not all writes
        can be taken, none is. Raises ``CaptureError`` for writes that nothing else would notice: into slots, arrays,
        and attributes of containers."""
        self._refuse_rest()
        found = [*self._found()]
        if not found or not all(_is_as_before(*one) for one in self._others):
            return result
        slots = {id(one): structure.ArgumentSlot(self._first + number) for number, one in enumerate(self._holders)}
        values = tuple(_with_slots(value, slots) for _, value in found)
        result, written = _with_slots(result, slots), {write.number for write, _ in found}
        changed = {id(self._holders[number]) for number in written}
        elsewhere = reachable([values, result, *map(own_attributes, model.modules())], _may_hold)  # unseen by observers
        if any(id(one) in changed for one in elsewhere) or not all(isinstance(write.key, PLAIN) for write, _ in found):
            return result
        self.told = self.plain_values()
        for number in written:
            _put_back(self._holders[number], self._before[number])
        self.made, self.values = tuple(write for write, _ in found), values
        return result

    def plain_values(self) -> dict[Any, Any]:
        """Numbers and texts that the run has written, by place. Stand-ins for numbers do not count."""
        found = {}
        for write, value in self._found():
            for place, one in enumerate(value if write.key is None else (value,)):
                if type(one) in _TOLD:
                    found[write.number, write.key, place] = type(one), exact(one)
        return found

    def _refuse_rest(self) -> None:
        lost = [(one, before) for one, read, before in self._rest if not _are_same(before, read(one))]
        for one, before in lost:  # some may belong to the caller
            if isinstance(one, np.ndarray):
                one[...] = before[_ARRAY]
            elif isinstance(one, bytearray):
                one[:] = before[_ARRAY]
            else:
                for name, value in before.items():
                    object.__setattr__(one, name, value)
        if lost:
            refuse_arguments()

    def _found(self) -> Iterator[tuple[ArgumentWrite, Any]]:
        for number, (holder, before) in enumerate(zip(self._holders, self._before, strict=True)):
            if isinstance(holder, list):
                if [*map(id, list.__iter__(holder))] != [*map(id, before)]:
                    yield ArgumentWrite(number, None), tuple(list.__iter__(holder))
                continue
            now = _copy(holder)
            moved = _moved(before, now)
            for key in before:
                if key not in now or key in moved:
                    yield ArgumentWrite(number, key, removed=True), None
            for key, value in now.items():
                if before.get(key, ABSENT) is not value or key in moved:
                    yield ArgumentWrite(number, key), value


def _reader_of_rest(one: Any) -> Callable[[Any], dict[str, Any]] | None:
    """A function that reads all of an argument that is in no holder: values in slots, attributes beside the items of a
    container, bytes of an array. Observers do not see it read."""
    if isinstance(one, (np.ndarray, bytearray)):
        return lambda array: {_ARRAY: array.copy()}
    if isinstance(one, CONTAINERS):
        return lambda container: dict(beside(container))
    return in_slots if is_open(one) and not isinstance(one, CLOSED) else None


def _are_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if before.keys() != now.keys():
        return False
    return all(
        content(value) == content(now[name]) if name == _ARRAY else value is now[name] for name, value in before.items()
    )


def _moved(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> set[Any]:
    """The keys from the first one on whose place has changed, as after an item was removed and inserted again."""
    stayed = [key for key in before if key in now]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(stayed, now, strict=False)))
    return set() if same == len(stayed) else {*itertools.islice(now, same, None)}


def _is_as_before(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is value for name, value in before.items())


def _items(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else own_attributes(holder)


def _copy(holder: Any) -> Any:
    return [*list.__iter__(holder)] if isinstance(holder, list) else items_of(_items(holder))


def _put_back(holder: Any, before: Any) -> None:
    refill(holder if isinstance(holder, list) else _items(holder), before)


def _with_slots(value: Any, slots: Mapping[int, structure.ArgumentSlot]) -> Any:
    """The value with slots in place of objects, by identity, in Python's own containers."""
    if id(value) in slots:
        return slots[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_with_slots(one, slots) for one in value)
    return {key: _with_slots(one, slots) for key, one in value.items()} if type(value) is dict else value


def _may_hold(value: Any) -> bool:
    return isinstance(value, CONTAINERS) or (is_open(value) and not isinstance(value, nn.Module))

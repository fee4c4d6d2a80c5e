"""What a forward pass writes into dictionaries, lists and objects among its arguments, as code does that hands a batch on from
module to module (``batch["features"] = self.encoder(batch["image"])``): planned calls write the same into those they are given.

A trace is given copies of them. What it leaves there is taken out again, and becomes a result: plain values as well, which
follow from those among the arguments, and from what else the program is made for.
"""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.objects import structure
from lowtide.objects.clones import items_of
from lowtide.objects.walk import ABSENT, CONTAINERS, PLAIN, is_open, own_attributes, reachable, refill

_DICTIONARIES = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True)
class ArgumentWrite:
    """Into the one of the arguments' ``holders`` with this number: a value under a ``key``, or as the name of an attribute;
    ``None`` where it is a list, all of which is written. ``removed``: what was there is taken away."""

    number: int
    key: Any
    removed: bool = False

    def perform(self, holders: Sequence[Any], value: Any) -> None:
        holder = holders[self.number]
        if isinstance(holder, list):
            holder[:] = value
        elif self.removed:
            _items(holder).pop(self.key, None)
        else:
            _items(holder)[self.key] = value


def holders(arguments: Any, given: Any) -> list[Any]:
    """The dictionaries, lists and objects that can be written in what was ``given``, with ``arguments`` as its structure."""
    return [*_holders(arguments, given)]


def are_distinct(given: Sequence[Any]) -> bool:
    """Whether none of these is there twice: what is written into one of a trace's copies would not be in the other."""
    return len({*map(id, given)}) == len(given)


def _holders(node: Any, given: Any) -> Iterator[Any]:
    if isinstance(node, structure.OpenObject):
        if own_attributes(given) is not None or (node.items is not None and not isinstance(given, tuple)):
            yield given
        for name, child in node.attributes.items():
            yield from _holders(child, object.__getattribute__(given, name))
        inside = () if node.items is None else node.items.leaves
        for child, one in zip(inside, structure.items_in(items_of(given)), strict=True):
            yield from _holders(child, one)
    elif isinstance(node, structure.Nested) and type(given) in (tuple, list, *_DICTIONARIES):
        if not isinstance(given, tuple):
            yield given
        for child, one in zip(node.leaves, structure.items_in(given), strict=True):
            yield from _holders(child, one)


class ArgumentWrites:
    """Of one run, on copies of the arguments of this structure, where these are ``distinct``. ``made``: where it has written,
    and ``values`` what."""

    def __init__(self, arguments: Any, given: Any, distinct: bool) -> None:
        self._holders = holders(arguments, given) if distinct else []
        self._before = [_copy(one) for one in self._holders]
        objects = structure.objects(arguments)
        self._first = len(objects)
        # That hold no tensors: what is written there is left for others to refuse, with all else.
        others = [own_attributes(one) for one in objects if is_open(one) or isinstance(one, types.SimpleNamespace)]
        self._others = [(own, dict(own)) for own in others if own is not None]
        self.made: tuple[ArgumentWrite, ...] = ()
        self.values: tuple[Any, ...] = ()

    def take(self, model: nn.Module, result: Any) -> Any:
        """The ``result`` of the run with slots for the holders, which are as before. Takes nothing where it cannot take all."""
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
        for number in written:
            _put_back(self._holders[number], self._before[number])
        self.made, self.values = tuple(write for write, _ in found), values
        return result

    def _found(self) -> Iterator[tuple[ArgumentWrite, Any]]:
        for number, (holder, before) in enumerate(zip(self._holders, self._before, strict=True)):
            if isinstance(holder, list):
                if [*map(id, holder)] != [*map(id, before)]:
                    yield ArgumentWrite(number, None), tuple(holder)
                continue
            now = _items(holder)
            moved = _moved(before, now)
            yield from (
                (ArgumentWrite(number, key, removed=True), None) for key in before if key not in now or key in moved
            )
            for key, value in now.items():
                if before.get(key, ABSENT) is not value or key in moved:
                    yield ArgumentWrite(number, key), value


def _moved(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> set[Any]:
    """The keys from the first one on that is not where it was, as where an item is taken out and put in again."""
    stayed = [key for key in before if key in now]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(stayed, now, strict=False)))
    return set() if same == len(stayed) else {*itertools.islice(now, same, None)}


def _is_as_before(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is value for name, value in before.items())


def _items(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else own_attributes(holder)


def _copy(holder: Any) -> Any:
    return [*holder] if isinstance(holder, list) else dict(_items(holder))


def _put_back(holder: Any, before: Any) -> None:
    refill(holder if isinstance(holder, list) else _items(holder), before)


def _with_slots(value: Any, slots: Mapping[int, structure.ArgumentSlot]) -> Any:
    """The same with slots instead of what is there by identity, in Python's own containers."""
    if id(value) in slots:
        return slots[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_with_slots(one, slots) for one in value)
    return {key: _with_slots(one, slots) for key, one in value.items()} if type(value) is dict else value


def _may_hold(value: Any) -> bool:
    return isinstance(value, CONTAINERS) or (is_open(value) and not isinstance(value, nn.Module))

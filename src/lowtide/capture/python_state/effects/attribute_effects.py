"""Plain attributes of modules that a forward pass writes.

A planned call does not run the model's Python, so it does itself to the attributes what the traced call did; the same holds
for attributes of objects that modules hold. A program is good for calls on a model that is as it was when it was captured
(``guards``), so what plain values such a call writes is known. Tensors are another matter, and so is a program that
changes, by what it writes, what it depends on. So where a forward pass changes attributes it is rehearsed, some times in a
row, on fake tensors (``rehearsal``):

=====================================================  ==========================================================
an attribute                                           is
=====================================================  ==========================================================
that gets a plain value (the longest length so far)    written after every planned call
that gets an object there is (``self.a = self.b``)     the same; what the call itself made is refused if it may be read
that gets tensors in every call (an auxiliary loss)    a result of the program, written after every planned call
... from which the next call computes (hidden state)   an input of the program too, as a buffer is
that gets tensors in the first call (a cached mask)    a result; the next call finds it there, and is another program
that is a number which is counted on                   counted on by planned calls too, see ``guards.compared``
that gets other values in every call (a list of them)  left as it is, said in the log, where nothing reads it
=====================================================  ==========================================================
"""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import logging
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lowtide.capture.python_state.effects.snapshots import Snapshot, modules_of
from lowtide.capture.python_state.paths import (
    HOLDING,
    AttributePath,
    attributes_of,
    enclosing,
    named,
    parts_of_holder,
    set_at,
    tensors_in,
    texts,
    value_at,
)
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.walk import ABSENT, CONTAINERS, MUTABLE, PLAIN, is_open, items, refill

_LOG = logging.getLogger(__name__)


# A verb and its object: set an attribute to a value; or refill, extend or update the container in it.
Change = tuple[str, Any]


class TensorEffect(NamedTuple):
    """An attribute that gets tensors. ``refilled``: it is a container that is emptied first. ``once``: only in the
    first call."""

    place: AttributePath
    refilled: bool = False
    once: bool = False


class ValueEffect(NamedTuple):
    """An attribute that gets a plain value, or an existing object of the user's (``own``)."""

    place: AttributePath
    change: Change
    own: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        return self.change[1]

    def again(self) -> Change:
        """The change, with new containers."""
        return copy.deepcopy(self.change, {id(one): one for one in self.own})

    @property
    def key(self) -> Any:
        """A key that is equal for two effects that do the same."""
        return self.place, self.change[0], _key_of(self.value, {*map(id, self.own)})

    def is_there(self, model: nn.Module) -> bool:
        """Whether the attribute has the value already."""
        own = {*map(id, self.own)}
        return bool(_key_of(value_at(model, self.place), own) == _key_of(self.value, own))


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences from a snapshot: places that hold tensors now, and all others."""

    tensors: tuple[AttributePath, ...] = ()
    plain: tuple[AttributePath, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.plain)


def changes(model: nn.Module, before: Snapshot) -> Changes:
    """What differs from the snapshot ``before``. Raises ``CaptureError`` if modules were replaced."""
    now = modules_of(model)
    replaced = [
        name or "itself" for name in {**before.modules, **now} if _is_other(before.modules.get(name), now.get(name))
    ]
    if replaced:
        raise CaptureError(
            f"the forward pass replaces submodules of the model, or classes of its modules ({named(replaced)}), which a plan "
            "cannot follow. Where it does so in its first call only, call the model once before it is rematerialized."
        )
    found = dict(attributes_of(model))
    elsewhere = ((place, value_at(model, place)) for place in before.attributes.keys() - found.keys())
    found |= {place: value for place, value in elsewhere if value is not ABSENT}  # reached by another way now, too
    changed = {place for place, value in found.items() if before.differs(model, place, value)}
    changed |= before.attributes.keys() - found.keys()
    places = [*found, *sorted(before.attributes.keys() - found.keys())]
    outer = [place for place in places if place in changed and not changed & set(enclosing(place))]
    holding = [place for place in outer if place in found and tensors_in(found[place])]
    shared = {id(found[place]): place for place in reversed(holding) if isinstance(found[place], MUTABLE)}
    once = [place for place in holding if shared.get(id(found[place]), place) == place]  # one list of several modules
    return Changes(tuple(once), tuple(place for place in outer if place not in holding))


def settings(
    model: nn.Module,
    before: Snapshot,
    changed: Changes,
    assigned: Collection[AttributePath],
    own_of: Callable[[Any], Any],
) -> tuple[tuple[ValueEffect, ...], tuple[AttributePath, ...]]:
    """The plain values that a traced call wrote, from what it ``changed`` and what it ``assigned`` (including
    assignments of the same value); and the places that got other values, made by the call, which planned calls leave
    alone. ``own_of``: gives the user's object for an object of the traced model, or ``ABSENT``."""
    found = dict(attributes_of(model))
    places = [
        *changed.plain,
        *(p for p in assigned if p in found and p not in changed.plain and p not in changed.tensors),
    ]
    effects, unknown = [], []
    for place in places:
        value = found[place] if place in found else value_at(model, place)
        in_place = before.items_of(place, value) is not None
        rewritten = not in_place and place in changed.plain and before.attributes.get(place) is value  # an array, say
        own = None if rewritten else _own_in(value, own_of, inside=in_place)
        if own is None:
            unknown.append(place)
            continue
        own_value = copy.deepcopy(value, dict(own))
        effects.append(ValueEffect(place, ("refill" if in_place else "set", own_value), tuple(one for _, one in own)))
    return tuple(effects), tuple(place for place in unknown if place in changed.plain)


def _own_in(value: Any, own_of: Callable[[Any], Any], inside: bool = False) -> list[tuple[int, Any]] | None:
    """The user's own objects in a value, or in all that is ``inside`` it, each with the id of its stand-in. ``None`` if
    something in it is not plain and was made by the call."""
    if isinstance(value, types.BuiltinFunctionType):  # a copied method cannot be told apart from the method of a copy
        return [] if isinstance(value.__self__, types.ModuleType | type | None) else None
    if isinstance(value, (*PLAIN, enum.Enum, type)):
        return []
    own = ABSENT if inside else own_of(value)
    if own is not ABSENT:
        return [(id(value), own)]
    if not isinstance(value, HOLDING):
        return None
    found = [_own_in(part, own_of) for part in parts_of_holder(value)]
    return None if None in found else [one for each in found if each is not None for one in each]


def _key_of(value: Any, own: Collection[int]) -> Any:
    if id(value) in own:
        return id(value)
    if isinstance(value, HOLDING):
        return [type(value), *(_key_of(part, own) for part in parts_of_holder(value))]
    return repr(value)


def _is_constant(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return all(map(_is_constant, items(value)))
    return isinstance(value, (*PLAIN, enum.Enum))


def written(model: nn.Module, before: Snapshot, places: Sequence[TensorEffect]) -> list[Change]:
    """The changes that bring the attributes from their former values to the present ones."""
    return [_written(value_at(model, effect.place), before, effect) for effect in places]


def _written(value: Any, before: Snapshot, effect: TensorEffect) -> Change:
    if effect.refilled and isinstance(value, MUTABLE):
        return "refill", value
    items = before.items_of(effect.place, value)
    if items is None:
        return "set", value
    # Includes what was written in place.
    written = {id(one) for one in structure.items_in(value) if not before.contents.same(one, one)}
    if isinstance(value, dict):
        update = {k: v for k, v in value.items() if k not in items or items[k] is not v or id(v) in written}
        return ("update", update) if update and all(key in value for key in items) else ("refill", value)
    old = set(map(id, items))
    added = list(itertools.dropwhile(lambda item: id(item) in old, value))
    longer = [*items, *added][-value.maxlen :] if isinstance(value, deque) and value.maxlen else [*items, *added]
    same = not written.intersection(old) and len(longer) == len(value) and all(map(operator.is_, longer, value))
    return ("extend", added) if added and same and not isinstance(value, set) else ("refill", value)


def write(model: nn.Module, changes: Iterable[tuple[AttributePath, Change]]) -> None:
    """Make the changes that the traced forward pass made."""
    for place, (verb, value) in changes:
        found = value_at(model, place)
        if verb == "set" or not isinstance(found, MUTABLE):
            if found is not value:
                set_at(model, place, value)
        elif verb == "refill":
            refill(found, value)
        else:
            getattr(found, verb)(value)


class Before:
    """The former value of an attribute. It keeps alive neither tensors nor other objects that are not plain, so these
    may be gone."""

    def __init__(self, place: AttributePath, value: Any) -> None:
        self.place = place
        self.container = value if isinstance(value, MUTABLE) else None
        self.object = value if is_open(value) else None  # its attributes are recorded separately
        tensors, self._structure = structure.flatten(copy.copy(value) if self.container is not None else value)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._known = bool(tensors) or _is_constant(value)

    def known(self) -> bool:
        return self._known and all(reference() is not None for reference in self._tensors)

    def value(self) -> Any:
        return structure.unflatten(self._structure, [reference() for reference in self._tensors])


@contextlib.contextmanager
def undone(model: nn.Module, before: Sequence[Before]) -> Iterator[None]:
    """A context in which attributes have their former values, where these are known."""
    changes = []
    for item in before:
        found = value_at(model, item.place)
        if item.known() and (found is None or found is not item.object):
            inside = found is not None and found is item.container
            now = ("refill", copy.copy(found)) if inside else ("set", found)
            changes.append((item.place, now, (now[0], item.value())))
    changes.sort(key=lambda change: change[1][0] == "set")  # containers first
    try:
        write(model, [(place, then) for place, _, then in changes])
        yield
    finally:
        changes.sort(key=lambda change: change[1][0] != "set")  # in the order in which the forward pass wrote them
        write(model, [(place, now) for place, now, _ in changes])


def say_unknown(model: nn.Module, places: Sequence[AttributePath]) -> None:
    """Log which attributes planned calls leave alone, except the bookkeeping of PyTorch's own modules."""
    theirs = [place for place in places if not type(model.get_submodule(place[0])).__module__.startswith("torch.")]
    if theirs:
        _LOG.warning(
            "the forward pass writes objects or arrays in plain attributes (%s), which planned calls leave as they are",
            texts(theirs),
        )


def _is_other(one: tuple[nn.Module, type] | None, other: tuple[nn.Module, type] | None) -> bool:
    return one is None or other is None or one[0] is not other[0] or one[1] is not other[1]

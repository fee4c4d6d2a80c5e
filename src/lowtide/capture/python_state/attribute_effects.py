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
that gets tensors in every call (an auxiliary loss)    a result of the program, written after every planned call
... from which the next call computes (hidden state)   an input of the program too, as a buffer is
that gets tensors in the first call (a cached mask)    a result; the next call finds it there, and is another program
that is a number which is counted on                   counted on by planned calls too, see ``python_state.compared``
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
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lowtide.capture.python_state.paths import (
    AttributePath,
    attributes_of,
    enclosing,
    named,
    set_at,
    tensors_in,
    texts,
    value_at,
)
from lowtide.capture.python_state.reads import Contents
from lowtide.errors import CaptureError
from lowtide.program import structure
from lowtide.program.objects import ABSENT, CONTAINERS, MUTABLE, PLAIN, is_open, items, refill

_LOG = logging.getLogger(__name__)


# A verb and its object: to set an attribute to a value; or to refill, extend or update the container that is there.
Change = tuple[str, Any]


class TensorEffect(NamedTuple):
    """An attribute that gets tensors. ``refilled``: a container that is emptied first; ``once``: in the first call alone."""

    place: AttributePath
    refilled: bool = False
    once: bool = False


class ValueEffect(NamedTuple):
    """An attribute that gets a plain value."""

    place: AttributePath
    change: Change

    @property
    def value(self) -> Any:
        return self.change[1]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The attributes of all modules of a model, and what was in them. ``containers``: copies of those that can be written in
    place."""

    attributes: dict[AttributePath, Any]
    contents: Contents
    modules: dict[str, nn.Module]
    containers: dict[AttributePath, Any]

    def items_of(self, place: AttributePath, value: Any) -> Any:
        """A copy of the container there, where it is this one; ``None`` otherwise."""
        return self.containers.get(place) if self.attributes.get(place) is value else None

    def differs(self, place: AttributePath, value: Any) -> bool:
        """Whether there is another value than this one was, or another one in it."""
        return place not in self.attributes or not self.contents.same(self.attributes[place], value)


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from a snapshot: places with tensors in them now, and all others."""

    tensors: tuple[AttributePath, ...] = ()
    plain: tuple[AttributePath, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.plain)


def snapshot(model: nn.Module) -> Snapshot:
    found, contents = dict(attributes_of(model)), Contents()
    contents.keep(found.values(), entered=lambda one: not is_open(one))  # whose attributes are places of their own
    containers = {place: copy.copy(value) for place, value in found.items() if isinstance(value, MUTABLE)}
    return Snapshot(found, contents, _modules(model), containers)


def put_back(model: nn.Module, before: Snapshot) -> None:
    """Let the attributes be what they were, and hold what they held."""
    found = dict(attributes_of(model))
    for place in found.keys() - before.attributes.keys():
        set_at(model, place, ABSENT)
    for place, value in before.attributes.items():
        if found.get(place, ABSENT) is not value:
            set_at(model, place, value)
        if place in before.containers:
            refill(value, before.containers[place])


def changes(model: nn.Module, before: Snapshot) -> Changes:
    """Raises ``CaptureError`` where modules are others than they were."""
    now = _modules(model)
    replaced = [name for name in {**before.modules, **now} if before.modules.get(name) is not now.get(name)]
    if replaced:
        raise CaptureError(
            f"the forward pass replaces submodules of the model ({named(replaced)}), which a plan cannot follow. Where it "
            "does so in its first call only, call the model once before it is rematerialized."
        )
    found = dict(attributes_of(model))
    changed = {place for place, value in found.items() if before.differs(place, value)}
    changed |= before.attributes.keys() - found.keys()
    places = [*found, *sorted(before.attributes.keys() - found.keys())]
    outer = [place for place in places if place in changed and not changed & set(enclosing(place))]
    holding = [place for place in outer if place in found and tensors_in(found[place])]
    shared = {id(found[place]): place for place in reversed(holding) if isinstance(found[place], MUTABLE)}
    once = [place for place in holding if shared.get(id(found[place]), place) == place]  # one list of several modules
    return Changes(tuple(once), tuple(place for place in outer if place not in holding))


def settings(
    model: nn.Module, before: Snapshot, changed: Changes, assigned: Collection[AttributePath]
) -> tuple[tuple[ValueEffect, ...], tuple[AttributePath, ...]]:
    """What plain values a traced call wrote, by what it ``changed`` and what it ``assigned`` (also what was there before); and
    the places with other values in them, made by the call, which are left as they were."""
    found = dict(attributes_of(model))
    places = [
        *changed.plain,
        *(p for p in assigned if p in found and p not in changed.plain and p not in changed.tensors),
    ]
    values = [(place, found.get(place, ABSENT)) for place in places]
    constants = [
        ValueEffect(place, ("set" if before.items_of(place, value) is None else "refill", copy.deepcopy(value)))
        for place, value in values
        if _is_constant(value)
    ]
    return tuple(constants), tuple(p for p, value in values if not _is_constant(value) and p in changed.plain)


def _is_constant(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return all(map(_is_constant, items(value)))
    return isinstance(value, (*PLAIN, enum.Enum))


def written(model: nn.Module, before: Snapshot, places: Sequence[TensorEffect]) -> list[Change]:
    """How to bring the attributes from what they were to what they are."""
    return [_written(value_at(model, effect.place), before, effect) for effect in places]


def _written(value: Any, before: Snapshot, effect: TensorEffect) -> Change:
    if effect.refilled and isinstance(value, MUTABLE):
        return "refill", value
    items = before.items_of(effect.place, value)
    if items is None:
        return "set", value
    if isinstance(value, dict):
        update = {k: v for k, v in value.items() if k not in items or items[k] is not v}
        return ("update", update) if update and all(key in value for key in items) else ("refill", value)
    old = set(map(id, items))
    added = list(itertools.dropwhile(lambda item: id(item) in old, value))
    longer = [*items, *added][-value.maxlen :] if isinstance(value, deque) and value.maxlen else [*items, *added]
    same = len(longer) == len(value) and all(map(operator.is_, longer, value))
    return ("extend", added) if added and same and not isinstance(value, set) else ("refill", value)


def write(model: nn.Module, changes: Iterable[tuple[AttributePath, Change]]) -> None:
    """Do to the attributes what the traced forward pass did."""
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
    """What an attribute was. Tensors are not kept alive, so that it may be gone; nor is what is no plain value."""

    def __init__(self, place: AttributePath, value: Any) -> None:
        self.place = place
        self.container = value if isinstance(value, MUTABLE) else None
        self.object = value if is_open(value) else None  # whose own attributes are remembered by themselves
        tensors, self._structure = structure.flatten(copy.copy(value) if self.container is not None else value)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._known = bool(tensors) or _is_constant(value)

    def known(self) -> bool:
        return self._known and all(reference() is not None for reference in self._tensors)

    def value(self) -> Any:
        return structure.unflatten(self._structure, [reference() for reference in self._tensors])


@contextlib.contextmanager
def undone(model: nn.Module, before: Sequence[Before]) -> Iterator[None]:
    """Inside, attributes are as they were, where that is known."""
    changes = []
    for item in before:
        found = value_at(model, item.place)
        if item.known() and (found is None or found is not item.object):
            inside = found is not None and found is item.container
            now = ("refill", copy.copy(found)) if inside else ("set", found)
            changes.append((item.place, now, (now[0], item.value())))
    changes.sort(key=lambda change: change[1][0] == "set")  # containers first, where they are
    try:
        write(model, [(place, then) for place, _, then in changes])
        yield
    finally:
        write(model, [(place, now) for place, now, _ in reversed(changes)])


def say_unknown(model: nn.Module, places: Sequence[AttributePath]) -> None:
    """Log what is left as it was, but for the bookkeeping of PyTorch's own modules."""
    theirs = [place for place in places if not type(model.get_submodule(place[0])).__module__.startswith("torch.")]
    if theirs:
        _LOG.warning(
            "the forward pass writes objects or arrays in plain attributes (%s), which planned calls leave as they are",
            texts(theirs),
        )


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))

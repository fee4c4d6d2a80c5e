"""Counters: state outside of the model that every forward pass reads and changes, such as a global or closure variable.

A planned call does not run the code that counts, so no operator may depend on a counter (``rehearsal``), now or in a later
call: no code may read it (``Readers``). A capture is not a call, so it restores counters. What only the first call changes is a
cache, and stays filled.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import copy
import io
import itertools
import threading
import types
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import nn

from lowtide.capture.python_state.code.code_names import functions_of, is_only_stored, is_read, is_trusted, names_in
from lowtide.capture.python_state.code.installed import is_installed
from lowtide.capture.python_state.guards.caches import Results
from lowtide.capture.python_state.guards.reads import Contents, Read, Reads, identical
from lowtide.capture.python_state.paths import AttributePath, leaf, named
from lowtide.errors import CaptureError
from lowtide.objects import opaque
from lowtide.objects.places import current
from lowtide.objects.walk import ABSENT, MUTABLE, content, own_attributes, reachable, refill

_ENDLESS = (itertools.count, itertools.cycle, itertools.repeat)
_OF_OBJECTS = ("attribute", "slot", "class")


def changed(reads: Reads) -> list[Read]:
    """The reads of one run whose values the run has changed."""
    before = Contents(reads.contents)
    # Not results of caches, which the capture itself clears.
    some = (read for read in reads.values.values() if type(read.owner) is not Results)
    return [read for read in some if not before.same(read.value, current(*read[:3]))]


def spent(some: Iterable[Read], reads: Reads) -> list[Read]:
    """The reads, of those a run changed, that contain an advanced finite iterator: later runs may find it exhausted."""
    before = Contents(reads.contents)

    def comes_closer(one: Any) -> bool:
        ends = isinstance(one, Iterator) and not isinstance(one, (io.IOBase, *_ENDLESS))
        return ends and id(one) in reads.contents and not before.same(one, one)

    return [
        read for read in some if any(map(comes_closer, reachable([read.value], lambda one: content(one) is not None)))
    ]


def refuse(lost: Sequence[Read]) -> None:
    """Raise ``CaptureError`` for state outside of the model that every call changes and planned calls would not."""
    if lost:
        raise CaptureError(
            "the program depends on what its own forward pass changes outside of the model "
            f"({named([one.text for one in lost])}), or may do so in a later call. Change that outside of the forward pass and "
            "pass it as a tensor, keep it in a buffer (self.register_buffer(...), self.steps.add_(1)), or run the model under "
            "lowtide.online."
        )


def as_now(some: Iterable[Read]) -> Reads:
    """The same reads with their current values and contents."""
    reads = Reads({one.place: one._replace(value=current(*one[:3])) for one in some})
    Contents(reads.contents).keep(one.value for one in reads.values.values())
    return reads


class Readers:
    """The functions of a model, and those that its code names: all code that may read state that a call leaves."""

    def __init__(self, model: nn.Module, reads: Reads) -> None:
        self._model = model
        named = [read.owner for read in reads.values.values() if (read.kind, read.name) == ("made of", "__code__")]
        named = [one for one in named if not is_installed(one.__code__.co_filename)]
        kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not is_trusted(kind)}
        methods = [one for kind in kinds for one in functions_of(kind) if isinstance(one, types.FunctionType)]
        self._functions = [*dict.fromkeys([*named, *methods])]

    def that_run(self, codes: Collection[types.CodeType]) -> Readers:
        """Readers restricted to functions whose code is in ``codes``."""
        found = copy.copy(self)
        found._functions = [one for one in self._functions if one.__code__ in codes]
        return found

    def of(self, variables: Iterable[Read]) -> list[Read]:
        """The ``variables`` that a function may use for more than writing to them."""
        return [one for one in variables if self._read(one.name, one.kind in _OF_OBJECTS)]

    def of_attributes(self, places: Iterable[AttributePath]) -> list[AttributePath]:
        """The attributes of the model that a function may read. Those of PyTorch's own modules are left out (trusted)."""
        return [place for place in places if self._may_read(place)]

    def of_any(self, places: Collection[AttributePath]) -> list[AttributePath]:
        """The attributes that a function may read, including those put on PyTorch's own modules; not those only stored."""
        names = (leaf(place) for place in places)
        read = [self._read(name, by_string=True) and not is_only_stored(name, self._functions) for name in names]
        return list(itertools.compress(places, read))

    def of_objects(self, places: Iterable[AttributePath]) -> list[AttributePath]:
        """The attributes that a function may read, of those in which a call leaves an object of its own; not those only
        stored."""
        return [place for place in places if self._may_read(place) and not is_only_stored(leaf(place), self._functions)]

    def name(self, *names: str) -> bool:
        """Whether any of the functions names one of ``names``."""
        return any(not names_in(one.__code__).all.isdisjoint(names) for one in self._functions)

    def _may_read(self, place: AttributePath) -> bool:
        if leaf(place) == "training":
            return True
        theirs = not is_trusted(type(self._model.get_submodule(place[0])))
        return theirs and self._read(leaf(place), by_string=True)

    def _read(self, name: str, by_string: bool) -> bool:
        return is_read(name, self._functions, by_string)


def put_back(counters: Iterable[Read], reads: Reads) -> None:
    """Restore counters to the values that were first read. ``reads`` has the original contents of holders."""
    rewound: dict[int, Any] = {}
    for counter in counters:
        read = reads.values.get(counter.place, counter)
        value = ABSENT if _was_absent(read, reads) else _rewound(read.value, reads, rewound)
        if current(*read[:3]) is not value:
            assign(*read[:3], value)
        for holder in reachable([value], _can_be_filled):
            known = reads.contents.get(id(holder))
            if known is not None:
                items = [_rewound(item, reads, rewound) for item in known.items]
                if not identical(content(holder) or (), items):
                    _fill(holder, items)


def _was_absent(read: Read, reads: Reads) -> bool:
    """Whether a run has added the attribute: its owner did not have the name when its attributes were first read."""
    names = reads.values.get(("names", id(read.owner), ""))
    return names is not None and read.kind in ("attribute", "class") and read.name not in names.value


def _can_be_filled(value: Any) -> bool:
    items = content(value)
    return items is not None and not opaque.is_told_by_parts(items, value)


def _rewound(value: Any, reads: Reads, rewound: dict[int, Any]) -> Any:
    """A new iterator at the recorded position, for an iterator that advanced (also inside a tuple); other values unchanged.
    ``rewound`` maps ids of iterators to their replacements."""
    if type(value) is tuple:
        items = tuple(_rewound(one, reads, rewound) for one in value)
        return value if identical(value, items) else items
    known = reads.contents.get(id(value)) if isinstance(value, Iterator) else None
    if known is None or id(value) in rewound or Contents(reads.contents).same(value, value):
        return rewound.get(id(value), value)
    rewound[id(value)] = value
    try:
        make, arguments, *state = known.items
        iterator = make(*_rewound(arguments, reads, rewound))
        for one in state:
            iterator.__setstate__(_rewound(one, reads, rewound))
        rewound[id(value)] = iterator
    except (AttributeError, TypeError, ValueError):  # it cannot be recreated, such as a generator
        pass
    return rewound[id(value)]


def assign(kind: str, owner: Any, name: Any, value: Any) -> None:
    """Write ``value`` to a place, the inverse of ``objects.places.current``; ``ABSENT`` removes what is there."""
    variables = own_attributes(owner) if kind == "attribute" else owner if kind == "item" else None
    if variables is not None and value is not ABSENT:
        variables[name] = value
    elif variables is not None:
        variables.pop(name, None)
    elif kind == "cell":
        owner.cell_contents = value
    elif kind == "class" and name in vars(owner):
        setattr(owner, name, value) if value is not ABSENT else delattr(owner, name)
    elif kind == "held":
        into: Any = vars(owner) if isinstance(owner, types.SimpleNamespace) else owner
        (dict if isinstance(into, dict) else list).__setitem__(into, name, value)
    elif kind == "slot":
        object.__setattr__(owner, name, value)
    elif kind == "names":
        for added in {*current(kind, owner, name)} - {*value}:
            delattr(owner, added)


def _fill(holder: Any, items: Sequence[Any]) -> None:
    if isinstance(holder, (*MUTABLE, defaultdict)):
        before = len(content(type(holder)()) or ())  # leading non-items, such as a deque's ``maxlen``
        items = items[before:]
    half = len(items) // 2
    if isinstance(holder, dict):
        refill(holder, dict(zip(items[:half], items[half:], strict=True)))
    elif isinstance(holder, MUTABLE):
        refill(holder, items)
    elif isinstance(holder, (types.SimpleNamespace, threading.local)):
        refill(vars(holder), dict(zip(items[:half], items[half:], strict=True)))
    elif isinstance(holder, contextvars.ContextVar) and items:
        holder.set(items[0])
    elif isinstance(holder, types.CellType):
        holder.cell_contents = items[0]
    elif isinstance(holder, (io.BytesIO, io.StringIO)):
        cast(Any, holder).__setstate__(items[0])
    elif isinstance(holder, io.IOBase) and isinstance(items[1], int):
        holder.seek(items[1])
    elif isinstance(holder, (bytearray, array.array, np.ndarray)):
        # If it has another length or is read-only, it stays as it is.
        with contextlib.suppress(StopIteration, TypeError, ValueError):
            memoryview(cast(Any, holder)).cast("B")[:] = next(item for item in items if isinstance(item, bytes))

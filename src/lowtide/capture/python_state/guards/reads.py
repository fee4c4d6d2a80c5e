"""Records of what Python code read (made by an observer), and how guards compare them with current values."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state.guards.caches import Results
from lowtide.capture.python_state.guards.external_effects import hooks_of
from lowtide.capture.python_state.guards.files import Watched
from lowtide.capture.python_state.paths import named
from lowtide.capture.trace.patches import stood_for
from lowtide.errors import CaptureError
from lowtide.objects.keys import tensor_key
from lowtide.objects.places import current, innermost, key_of, part_name
from lowtide.objects.structure import Changing
from lowtide.objects.walk import ABSENT, MUTABLE, PLAIN, beside, class_attribute, content, exact, own_attributes
from lowtide.program.scalars import CHANGING

Place = tuple[str, int, Any]


class Read(NamedTuple):
    """A recorded value and its place: of ``owner`` under ``name``, found in the way of ``kind``
    (``objects.places.current``)."""

    kind: str
    owner: Any
    name: Any
    value: Any
    text: str

    @property
    def place(self) -> Place:
        """The key that identifies a read."""
        return self.kind, id(self.owner), self.name

    @property
    def outer(self) -> Place:
        """The place of the value that contains a part; for other kinds, the read's own place."""
        return (self.name[0], id(self.owner), self.name[1]) if self.kind == "part" else self.place

    @property
    def own(self) -> tuple[str, Any, Any]:
        """Kind, owner and name; for a part, those in its innermost holder."""
        return ("held", *innermost(self.owner, self.name)) if self.kind == "part" else self[:3]


def read_of(argument: Changing) -> Read:
    """The read of an argument value that changes from call to call."""
    return Read("argument", argument.values, argument.way, argument.value, argument.text)


class Content(NamedTuple):
    """A holder, and its items when it was first reached."""

    holder: Any
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The recorded items of holders, by the holders' ids. ``free``: ids of holders whose content may change; ``layouts``:
    layouts of tensors of which nothing else matters, by id; ``others``: checks of numbers that may change, by holder id and
    index."""

    held: dict[int, Content] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    layouts: Mapping[int, Any] = field(default_factory=dict)
    others: Mapping[int, Mapping[int, Callable[[Any], bool]]] = field(default_factory=dict)

    def keep(self, some: Iterable[Any], entered: Callable[[Any], bool] = lambda _: True) -> None:
        """Record the items of the holders among ``some``, recursively, except holders for which ``entered`` is false."""
        waiting = [*some]
        while waiting:
            value = waiting.pop()
            items = None if id(value) in self.held or isinstance(value, PLAIN) else content(value)
            if items is not None and entered(value):
                self.held[id(value)] = Content(value, items)
                waiting += items

    def same(self, kept: Any, value: Any, met: Met | None = None) -> bool:
        """Whether ``value`` is equivalent to ``kept`` for the program. ``met``: shared by several calls to compare aliasing
        too."""
        if id(kept) in self.layouts:
            return isinstance(value, torch.Tensor) and tensor_key(value) == self.layouts[id(kept)]
        known = self.held.get(id(kept))
        if known is None or known.holder is not kept:
            return kept is value or _equal(kept, value)
        if type(value) is not type(kept):
            return False
        if kept is value and id(kept) in self.free:
            return True
        met = Met() if met is None else met
        if not met.agree(kept, value):
            return False
        if not met.first(kept, value):
            return True
        items = content(value)
        if items is None or len(items) != len(known.items):
            return False
        others = self.others.get(id(kept), {})
        return all(
            others[index](other) if index in others else self.same(one, other, met)
            for index, (one, other) in enumerate(zip(known.items, items, strict=True))
        )

    def different(self, kept: Any, value: Any) -> list[tuple[int, Any, Any]]:
        """Index, old and new item of each difference between a recorded holder and one of the same type and length."""
        others, held = self.others.get(id(kept), {}), zip(self.held[id(kept)].items, content(value) or (), strict=True)
        pairs = [(index, *pair) for index, pair in enumerate(held) if index not in others]
        return [(index, one, other) for index, one, other in pairs if not self.same(one, other)]

    def other_numbers(self, read: Read) -> Iterator[Read]:
        """Yield the numbers nested in a recorded value that have changed, each as a read of kind ``part``."""
        waiting: list[tuple[Any, Any, tuple[Any, ...], str]] = [
            (read.value, current(*read[:3]), (read.kind, read.name), read.text)
        ]
        met = set[int]()
        while waiting:
            kept, value, way, text = waiting.pop()
            known = None if id(kept) in met else self.held.get(id(kept))
            met.add(id(kept))
            items = content(value) if known is not None and type(value) is type(kept) else None
            if known is None or items is None or len(items) != len(known.items):
                continue
            for index, one, other in self.different(kept, value):
                key, name = key_of(value, index), f"{text}{part_name(value, index)}"
                if key is not ABSENT and type(one) is type(other):
                    if type(one) in CHANGING:
                        yield Read("part", read.owner, (*way, key), one, name)
                    else:
                        waiting.append((one, other, (*way, key), name))


class Met:
    """The pairs of holders compared so far, to detect changed aliasing and to end cycles."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], Any] = {}  # keeps the values alive, so that no id is reused
        self._partners: tuple[dict[int, int], dict[int, int]] = {}, {}

    def agree(self, kept: Any, value: Any) -> bool:
        """Whether two mutable containers have only been paired with each other, so that aliasing is the same; true for
        others."""
        if not isinstance(kept, (*MUTABLE, types.SimpleNamespace)):
            return True
        one, other = self._partners
        return one.setdefault(id(kept), id(value)) == id(value) and other.setdefault(id(value), id(kept)) == id(kept)

    def first(self, kept: Any, value: Any) -> bool:
        """Whether this pair is compared for the first time. Adds it."""
        new = (id(kept), id(value)) not in self._pairs
        self._pairs[id(kept), id(value)] = value
        return new


def identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences consist of the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _equal(kept: Any, value: Any) -> bool:
    if isinstance(kept, types.MethodType) and isinstance(value, types.MethodType):  # each read creates a new one
        return kept.__func__ is value.__func__ and kept.__self__ is value.__self__
    if type(kept) is not type(value) or not isinstance(kept, (*PLAIN, np.generic)):
        return False
    one, other = beside(kept), beside(value)
    same = one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return same and bool(exact(kept) == exact(value))


@dataclass(eq=False)
class Reads:
    """Everything that one or several runs read: values by place, the contents of holders by id, and more."""

    values: dict[Place, Read] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)
    hidden: dict[int, tuple[nn.Module, list[Any]]] = field(default_factory=dict)  # modules not registered in the model
    files: dict[Watched, Any] = field(default_factory=dict)
    caches: dict[int, Results] = field(default_factory=dict)  # of the user's functions, by their ids
    unknown: dict[int, str] = field(default_factory=dict)  # objects whose state is hidden, or consumed by reading

    @property
    def holders(self) -> list[Any]:
        return [held.holder for held in self.contents.values()]

    def add(self, later: Reads) -> None:
        """Add reads of a later run at places that earlier runs did not read."""
        for mine, others in zip(vars(self).values(), vars(later).values(), strict=True):
            mine.update({key: value for key, value in others.items() if key not in mine})

    def prefer(self, later: Reads) -> None:
        """Add reads of a later run, replacing earlier ones: the program comes from the later run."""
        for mine, others in zip(vars(self).values(), vars(later).values(), strict=True):
            mine.update(others)

    def forget(self, some: Iterable[Read]) -> None:
        for read in some:
            self.values.pop(read.place, None)

    def note(self, kind: str, owner: Any, name: str, value: Any, text: str) -> None:
        value = stood_for(value)  # the original of a function patched for capture
        self.values.setdefault((kind, id(owner), name), Read(kind, owner, name, value, text))

    def refuse_unknown(self) -> None:
        """Raise ``CaptureError`` if objects of unknown state were read. Called at once, since a capture cannot restore what it
        consumes, and again at the end, since the user's code may have caught the first error."""
        if self.unknown:
            raise CaptureError(
                "the forward pass reads objects of native code that do not show what they hold, or generators "
                f"({named([*self.unknown.values()])}): a capture could not leave them as they were, nor a planned call know "
                "whether they still are so. Read them outside of the forward pass and keep or pass what they say, or run the "
                "model under lowtide.online."
            )

    def note_names(self, owner: Any, found: Iterable[str], text: str) -> None:
        """Record the names of the attributes of ``owner``."""
        names = tuple(found)
        self.contents[id(names)] = Content(names, names)
        self.note("names", owner, "", names, f"the attributes of {text}")


def compiled_attributes(module: nn.Module) -> list[str]:
    """The attributes of a module compiled by ``torch.jit``, as text; Python code does not read them."""
    return [sys.intern(module._c.dump_to_str(False, True, False))] if isinstance(module, torch.jit.ScriptModule) else []


def put_together(module: nn.Module) -> list[Any]:
    """The parts of a module and all its submodules: classes, parameters, buffers, children and hooks."""
    return [
        part
        for one in module.modules()
        for part in (
            type(one), *one._parameters.values(), *one._buffers.values(), *one._modules.values(), *hooks_of(one),
            *compiled_attributes(one),
        )
    ]  # fmt: skip


def is_registered(owner: Any, name: str) -> bool:
    """Whether ``name`` is a parameter, buffer or submodule of a module."""
    own = vars(owner) if isinstance(owner, nn.Module) else {}
    return name not in own and any(name in own.get(each, ()) for each in ("_parameters", "_buffers", "_modules"))


def decided_by(owner: Any, name: str) -> list[tuple[str, Any]]:
    """The places (kind, owner) that determine an attribute of an object: the instance's and, if that may not decide, its
    class's."""
    kind = type(owner)
    if name == "__class__":
        return [("type", owner)]
    of_class = class_attribute(kind, name)
    if isinstance(of_class, (types.MemberDescriptorType, types.GetSetDescriptorType)):
        return [("slot", owner)]
    own = own_attributes(owner)
    if own is None:
        return [("class", kind)]
    here: list[tuple[str, Any]] = [("attribute", owner)]
    # A property later added to a module's class or its bases would take precedence.
    decided = isinstance(owner, nn.Module) or isinstance(of_class, property) or (name not in own)
    return [*here, ("class", kind)] if decided else here

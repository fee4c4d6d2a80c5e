"""What Python code read while it ran: the records that an observer makes, and how guards compare them."""

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
    """A value that was read. ``kind``: where ``owner`` has it under ``name`` (``objects.places.current``)."""

    kind: str
    owner: Any
    name: Any
    value: Any
    text: str

    @property
    def place(self) -> Place:
        """By which reads are told apart."""
        return self.kind, id(self.owner), self.name

    @property
    def outer(self) -> Place:
        """The place of what a part is of."""
        return (self.name[0], id(self.owner), self.name[1]) if self.kind == "part" else self.place

    @property
    def own(self) -> tuple[str, Any, Any]:
        """The kind, owner and name of a part in its holder, or of anything else."""
        return ("held", *innermost(self.owner, self.name)) if self.kind == "part" else self[:3]


def read_of(argument: Changing) -> Read:
    """Of a value among the arguments of a call, which is another one in every call."""
    return Read("argument", argument.values, argument.way, argument.value, argument.text)


class Content(NamedTuple):
    """A holder, and what was in it when it was first reached."""

    holder: Any
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What was in holders, by their ids. ``free``: ids of holders that may hold anything; ``layouts``: of tensors, by their
    ids, whose layout alone matters; ``others``: whether another number may be in a holder, by its id, at an index."""

    held: dict[int, Content] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    layouts: Mapping[int, Any] = field(default_factory=dict)
    others: Mapping[int, Mapping[int, Callable[[Any], bool]]] = field(default_factory=dict)

    def keep(self, some: Iterable[Any], entered: Callable[[Any], bool] = lambda _: True) -> None:
        """Add what holders among these hold, and those in them, where they are ``entered``."""
        waiting = [*some]
        while waiting:
            value = waiting.pop()
            items = None if id(value) in self.held or isinstance(value, PLAIN) else content(value)
            if items is not None and entered(value):
                self.held[id(value)] = Content(value, items)
                waiting += items

    def same(self, kept: Any, value: Any, met: Met | None = None) -> bool:
        """Whether a value is to the program what ``kept`` was. ``met``: of several values, to be one where they were one."""
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
        """Where two holders of one type and of as many items, of which the first is known, hold something else, and what."""
        others, held = self.others.get(id(kept), {}), zip(self.held[id(kept)].items, content(value) or (), strict=True)
        pairs = [(index, *pair) for index, pair in enumerate(held) if index not in others]
        return [(index, one, other) for index, one, other in pairs if not self.same(one, other)]

    def other_numbers(self, read: Read) -> Iterator[Read]:
        """Numbers somewhere in what was read that are other ones there now, each as a part."""
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
    """Pairs of holders that were compared."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], Any] = {}  # with the values, so that no id comes again
        self._partners: tuple[dict[int, int], dict[int, int]] = {}, {}

    def agree(self, kept: Any, value: Any) -> bool:
        """Whether one of two containers that can be written has no other partner."""
        if not isinstance(kept, (*MUTABLE, types.SimpleNamespace)):
            return True
        one, other = self._partners
        return one.setdefault(id(kept), id(value)) == id(value) and other.setdefault(id(value), id(kept)) == id(kept)

    def first(self, kept: Any, value: Any) -> bool:
        """Whether they meet for the first time."""
        new = (id(kept), id(value)) not in self._pairs
        self._pairs[id(kept), id(value)] = value
        return new


def identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether both are of the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _equal(kept: Any, value: Any) -> bool:
    if isinstance(kept, types.MethodType) and isinstance(value, types.MethodType):  # made anew where they are read
        return kept.__func__ is value.__func__ and kept.__self__ is value.__self__
    if type(kept) is not type(value) or not isinstance(kept, (*PLAIN, np.generic)):
        return False
    one, other = beside(kept), beside(value)
    same = one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return same and bool(exact(kept) == exact(value))


@dataclass(eq=False)
class Reads:
    """All that one or several runs read: single values by kind, owner and name, and holders by their ids."""

    values: dict[Place, Read] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)
    hidden: dict[int, tuple[nn.Module, list[Any]]] = field(default_factory=dict)  # modules that are registered nowhere
    files: dict[Watched, Any] = field(default_factory=dict)
    caches: dict[int, Results] = field(default_factory=dict)  # of the user's functions, by their ids
    unknown: dict[int, str] = field(default_factory=dict)  # objects that do not show what they hold, or give it away

    @property
    def holders(self) -> list[Any]:
        return [held.holder for held in self.contents.values()]

    def add(self, later: Reads) -> None:
        """Those of a later run, where nothing is known from earlier ones."""
        for mine, others in zip(vars(self).values(), vars(later).values(), strict=True):
            mine.update({key: value for key, value in others.items() if key not in mine})

    def prefer(self, later: Reads) -> None:
        """What a later run found, where an earlier one has changed it: the program is the later run's."""
        for mine, others in zip(vars(self).values(), vars(later).values(), strict=True):
            mine.update(others)

    def forget(self, some: Iterable[Read]) -> None:
        for read in some:
            self.values.pop(read.place, None)

    def note(self, kind: str, owner: Any, name: str, value: Any, text: str) -> None:
        value = stood_for(value)  # what is there when nothing is captured
        self.values.setdefault((kind, id(owner), name), Read(kind, owner, name, value, text))

    def refuse_unknown(self) -> None:
        """Raises ``CaptureError`` where such objects were read; at once, since a capture cannot put back what it takes there,
        and once more at the end, since the user's code may have caught that."""
        if self.unknown:
            raise CaptureError(
                "the forward pass reads objects of native code that do not show what they hold, or generators "
                f"({named([*self.unknown.values()])}): a capture could not leave them as they were, nor a planned call know "
                "whether they still are so. Read them outside of the forward pass and keep or pass what they say, or run the "
                "model under lowtide.online."
            )

    def note_names(self, owner: Any, found: Iterable[str], text: str) -> None:
        """That ``owner`` has attributes of these names."""
        names = tuple(found)
        self.contents[id(names)] = Content(names, names)
        self.note("names", owner, "", names, f"the attributes of {text}")


def compiled_attributes(module: nn.Module) -> list[str]:
    """What a module that ``torch.jit`` has compiled has in its attributes, which Python code does not read."""
    return [sys.intern(module._c.dump_to_str(False, True, False))] if isinstance(module, torch.jit.ScriptModule) else []


def put_together(module: nn.Module) -> list[Any]:
    """What a module is made of: classes, parameters, buffers, hooks and submodules, all the way down."""
    return [
        part
        for one in module.modules()
        for part in (
            type(one), *one._parameters.values(), *one._buffers.values(), *one._modules.values(), *hooks_of(one),
            *compiled_attributes(one),
        )
    ]  # fmt: skip


def is_registered(owner: Any, name: str) -> bool:
    """Whether a module finds there a parameter, a buffer or a submodule."""
    own = vars(owner) if isinstance(owner, nn.Module) else {}
    return name not in own and any(name in own.get(each, ()) for each in ("_parameters", "_buffers", "_modules"))


def decided_by(owner: Any, name: str) -> list[tuple[str, Any]]:
    """What decides an attribute of an object: its own one or, where there is none, that none is there and its class's."""
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
    # A property that the class of a module, or one that it is derived from, gets would come first.
    decided = isinstance(owner, nn.Module) or isinstance(of_class, property) or (name not in own)
    return [*here, ("class", kind)] if decided else here

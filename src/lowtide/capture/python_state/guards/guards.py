"""What a program depends on that no argument of the call shows: what the model's Python code read while it was captured.

``Guards`` keeps the values that were read (``guards.observe``) and how the model's modules were put together, and tells
before each planned call whether all of it is still so: numbers, strings and holders (``objects.walk``) are compared by
what they are or hold, everything else is the very same object. Where nothing has changed, ``guards.quick`` says so in
some ten nanoseconds a value.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state.guards.compared import Comparisons
from lowtide.capture.python_state.guards.external_effects import hooks_of
from lowtide.capture.python_state.guards.files import Watched
from lowtide.capture.python_state.guards.forms import CONDITIONS, Form, OneContainer, of_one_container
from lowtide.capture.python_state.guards.quick import Unchanged
from lowtide.capture.python_state.guards.reads import (
    Contents,
    Met,
    Place,
    Read,
    Reads,
    compiled_attributes,
    identical,
    put_together,
)
from lowtide.capture.python_state.guards.standing import ComparedNumber
from lowtide.capture.python_state.paths import AttributePath, named, owned, value_at
from lowtide.capture.trace.patches import CAPTURING
from lowtide.objects import structure
from lowtide.objects.keys import tensor_key
from lowtide.objects.places import current, index_of, part_name
from lowtide.objects.walk import ABSENT, PLAIN, content
from lowtide.program.scalars import CHANGING

_REWIRED = ("is a {}", "is another {}", "has other hooks", "has other submodules", "has other attributes")
_CALLING = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")  # what it is to call a module, and to ask it
# And to take others from it.
_HOLDING = ("__bool__", "__contains__", "__getitem__", "__iter__", "__len__", "__reversed__")
_BESIDE = ("part", "computed")  # kinds of numbers that are not noted by themselves
_OTHERWISE = {Form: " holds other things", OneContainer: " is no longer another attribute's"}
_MOST_REMAKES = 8  # of the quick function, where equal values are put anew before each call


@dataclass(frozen=True, slots=True, eq=False)
class Guards:
    """``wiring``: of the modules, in order, see ``_wiring``. ``contents``: of holders that were read."""

    wiring: Sequence[tuple[Any, ...]] = ()
    reads: tuple[Read, ...] = ()
    contents: Contents = field(default_factory=Contents)
    hidden: tuple[tuple[nn.Module, list[Any]], ...] = ()
    files: Mapping[Watched, Any] = field(default_factory=dict)
    _quick: list[Unchanged] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        reads: Reads,
        free: Sequence[AttributePath] = (),
        told: Collection[AttributePath] = (),
        followed: Sequence[torch.Tensor] = (),
        after: Collection[tuple[AttributePath, Any]] = (),
        compared: Iterable[ComparedNumber] = (),
    ) -> Guards:
        """Of what was read, what must stay as it was. ``free``: attributes that may be anything, but for those that are
        ``told`` by more than the values of tensors in them; ``followed``: tensors whose layout alone matters; ``after``: other
        values than the model has now; ``compared``: how numbers compare that may be others. What the forward pass changes
        outside of the model is no condition: it would not hold for the next call."""
        anywhere = Contents()
        anywhere.keep(value_at(model, place) for place in free)
        layouts = {id(tensor): tensor_key(tensor) for tensor in followed}
        numbers = {one.read.place: one for one in compared if _is_read(one.read, reads)}
        others = _others([one for one in numbers.values() if one.read.kind == "part"])
        contents = Contents(dict(reads.contents), frozenset(anywhere.held), layouts, others)
        instead: dict[tuple[int, str], Any] = {}
        for place, value in after:
            instead[owned(model, place)] = value
            contents.keep([value])
        anything = {owned(model, place) for place in (("", "forward"), *free)}
        formed = {owned(model, place) for place in told}
        for results in reads.caches.values():
            results.settle()
        modules = [*model.modules()]
        kept = _special_methods(
            {type(module): None for module in (*modules, *(one for one, _ in reads.hidden.values()))}
        )
        for read in reads.values.values():
            key = id(read.owner), read.name
            if key in formed and _as_found(read, contents):
                kept.append(read._replace(value=Form.of(read.value)))
            if (key in anything and read.kind != "method") or not contents.same(read.value, current(*read[:3])):
                continue
            condition = numbers[read.place].comparisons if read.place in numbers else read.value
            kept.append(read._replace(value=instead.get(key, condition)))
        kept += of_one_container(model, free)
        kept += [one.read._replace(value=one.comparisons) for one in numbers.values() if one.read.kind in _BESIDE]
        return cls(
            _wiring(modules),
            tuple(kept),
            contents,
            tuple(reads.hidden.values()),
            {file: state for file, state in reads.files.items() if file.state() == state},
        )

    def hold(self, modules: Sequence[nn.Module]) -> bool:
        """Whether everything is as it was; ``modules`` are all of the model's. Where another thread captures, what it replaces
        meanwhile is there again first."""
        if self._quick and self._quick[-1]():
            return True
        waits = not CAPTURING.acquire(blocking=False)
        if waits:
            CAPTURING.acquire()
        try:
            if waits and self._quick and self._quick[-1]():
                return True
            if next(self._broken(modules), None) is not None:
                return False
            if len(self._quick) < _MOST_REMAKES:
                self._quick.append(Unchanged(modules, self.reads, self.contents, self.hidden, self.files))
            return True
        finally:
            CAPTURING.release()

    def broken(self, model: nn.Module) -> str:
        """In words, what is not as it was."""
        return named([text for text, _ in self._broken(list(model.modules()))])

    def other_tensors(self, model: nn.Module) -> set[AttributePath]:
        """Attributes of the model's modules whose tensors are not those that they were."""
        names = {id(module): name for name, module in model.named_modules()}
        broken = [
            read for _, read in self._broken(list(model.modules())) if read is not None and id(read.owner) in names
        ]
        return {
            (names[id(read.owner)], read.name)
            for read in broken
            if structure.flatten(vars(read.owner).get(read.name))[0]
        }

    def other_numbers(self, model: nn.Module) -> dict[Place, Read]:
        """Numbers that were read and are not those that they were, or compare otherwise."""
        broken = [read for _, read in self._broken(list(model.modules())) if read is not None]
        kinds = (*CHANGING, Comparisons)
        found = {r.place: r for r in broken if type(r.value) in kinds and type(current(*r[:3])) in CHANGING}
        parts = (part for read in broken if read.kind != "part" for part in self.contents.other_numbers(read))
        return found | {part.place: part for part in parts}

    def compared(self) -> dict[Place, Read]:
        """Numbers that were read, and only compared."""
        return {read.place: read for read in self.reads if type(read.value) is Comparisons}

    def functions(self) -> list[types.FunctionType]:
        """Those that the forward pass could call."""
        found = [one for read in self.reads for one in (read.owner, read.value) if type(one) is types.FunctionType]
        return [*dict.fromkeys(found)]

    def _broken(self, modules: Sequence[nn.Module]) -> Iterator[tuple[str, Read | None]]:
        yield from ((text, None) for text in _rewired(self.wiring, modules))
        yield from self.changed(self.reads)
        for module, parts in self.hidden:
            if not identical(parts, put_together(module)):
                yield f"{type(module).__name__} has other parameters, buffers, hooks or submodules", None
        for file, state in self.files.items():
            if file.state() != state:
                yield f"{file.text} is another one", None

    def changed(self, reads: Iterable[Read]) -> Iterator[tuple[str, Read]]:
        """Those of its ``reads`` that would find other values, and in words which."""
        met = Met()
        for read in reads:
            value = current(*read[:3])
            if not _same(self.contents, read.value, value, met):
                other = _OTHERWISE.get(type(read.value)) or self._difference(read.value, value)
                yield f"{read.text}{other}", read

    def _difference(self, kept: Any, value: Any) -> str:
        """In words, where in two values that are not the same the difference lies."""
        known = self.contents.held.get(id(kept))
        items = content(value) if known is not None and type(value) is type(kept) else None
        if known is None or items is None or isinstance(kept, np.ndarray) or len(items) != len(known.items):
            return f" is {_shown(value)}"
        found = next(iter(self.contents.different(kept, value)), None)
        if found is None:
            return " is no longer one object under several names, or has become one"
        index, one, other = found
        return f"{part_name(value, index)}{self._difference(one, other)}"


def _special_methods(kinds: Iterable[type]) -> list[Read]:
    """What Python looks up in classes of modules, where nobody sees it, as it is now: some are others while a model is traced.
    What a class does not have may come."""
    return [
        Read("class", kind, name, current("class", kind, name), f"{kind.__module__}.{kind.__qualname__}.{name}")
        for kind in (nn.Module, *kinds)
        for name in (*_CALLING, *_HOLDING)
    ]


def _as_found(read: Read, contents: Contents) -> bool:
    """Whether a run has read it before it wrote it."""
    return read.kind in ("attribute", "slot") and contents.same(read.value, current(*read[:3]))


def _is_read(read: Read, reads: Reads) -> bool:
    return read.kind == "computed" or read.outer in reads.values


def _others(numbers: Iterable[ComparedNumber]) -> dict[int, dict[int, Callable[[Any], bool]]]:
    """For ``Contents``: how parts compare that may be others."""
    found: dict[int, dict[int, Callable[[Any], bool]]] = {}
    for read, comparisons in numbers:
        _, holder, key = read.own
        found.setdefault(id(holder), {})[index_of(holder, key)] = comparisons.hold
    return found


def _same(contents: Contents, kept: Any, value: Any, met: Met) -> bool:
    return kept.hold(value) if type(kept) in CONDITIONS else contents.same(kept, value, met)


def _wiring(modules: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """Of each module what ``_REWIRED`` names. Hooks of the model itself are around its planned forward."""
    root = modules[0]
    return [
        (
            type(module),
            (module,),  # in which the same is equal, however modules compare
            () if module is root else hooks_of(module),
            [*module._modules.items()],
            compiled_attributes(module),
        )
        for module in modules
    ]


def _rewired(wiring: Sequence[Any], modules: Sequence[nn.Module]) -> Iterator[str]:
    """In words, what is put together otherwise."""
    if len(modules) != len(wiring):
        yield f"{len(modules)} modules instead of {len(wiring)}"
        return
    for (name, module), now, old in zip(modules[0].named_modules(), _wiring(modules), wiring, strict=True):
        difference = next((text for text, one, other in zip(_REWIRED, now, old, strict=True) if one != other), "")
        if difference:
            yield f"{name or type(modules[0]).__name__} {difference.format(type(module).__name__)}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    return repr(value) if isinstance(value, PLAIN) else f"another {type(value).__name__}"

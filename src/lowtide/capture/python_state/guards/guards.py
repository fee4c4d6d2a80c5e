"""Guards of a program: conditions on the Python state, other than the arguments, that the model's code read during capture.

``Guards`` keeps the values that were read (``guards.observe``) and the wiring of the model's modules, and checks before each
planned call whether all of it is unchanged. Numbers, strings and holders (``objects.walk``) are compared by value or content,
everything else by identity. If nothing has changed, ``guards.quick`` confirms it in some ten nanoseconds a value.
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
# Methods through which modules are called, and their attributes read.
_CALLING = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
# Used to get items from modules that are containers.
_HOLDING = ("__bool__", "__contains__", "__getitem__", "__iter__", "__len__", "__reversed__")
_BESIDE = ("part", "computed")  # kinds of numbers that have no recorded read of their own
_OTHERWISE = {Form: " holds other things", OneContainer: " is no longer another attribute's"}
_MOST_REMAKES = 8  # of the quick check, since a caller may set new but equal values before each call


@dataclass(frozen=True, slots=True, eq=False)
class Guards:
    """The conditions under which a program is valid. ``wiring``: of the modules, in order (``_wiring``). ``contents``: of
    holders that were read. ``hidden``: unregistered modules, with their parts. ``files``: the states of opened files."""

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
        """Make guards from recorded reads. ``free``: attributes that may have any value, but those also in ``told`` must keep
        everything except the values of their tensors; ``followed``: tensors of which only the layout is guarded; ``after``:
        values to expect instead of the current ones; ``compared``: numbers guarded only by how they compared. What the forward
        pass changed outside of the model is not guarded: the guard would fail in the next call."""
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
        """Whether all guards hold. ``modules``: all modules of the model. If the quick check fails while another thread
        captures, wait until that thread has restored what it patched, and check again."""
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
        """Describe the guards that fail, for messages."""
        return named([text for text, _ in self._broken(list(model.modules()))])

    def other_tensors(self, model: nn.Module) -> set[AttributePath]:
        """Places of module attributes that hold tensors and whose guards fail."""
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
        """Recorded numbers that have another value now, or compare differently."""
        broken = [read for _, read in self._broken(list(model.modules())) if read is not None]
        kinds = (*CHANGING, Comparisons)
        found = {r.place: r for r in broken if type(r.value) in kinds and type(current(*r[:3])) in CHANGING}
        parts = (part for read in broken if read.kind != "part" for part in self.contents.other_numbers(read))
        return found | {part.place: part for part in parts}

    def compared(self) -> dict[Place, Read]:
        """Recorded numbers that the code only compared."""
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
        """Yield those of ``reads`` whose value has changed, each with a description of the change."""
        met = Met()
        for read in reads:
            value = current(*read[:3])
            if not _same(self.contents, read.value, value, met):
                other = _OTHERWISE.get(type(read.value)) or self._difference(read.value, value)
                yield f"{read.text}{other}", read

    def _difference(self, kept: Any, value: Any) -> str:
        """Describe the first difference between two unequal values, for messages."""
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
    """Reads of the special methods of module classes, which Python looks up unobserved. Read now, after the trace, because
    some are replaced during it. Absent ones are included, since they may be added."""
    return [
        Read("class", kind, name, current("class", kind, name), f"{kind.__module__}.{kind.__qualname__}.{name}")
        for kind in (nn.Module, *kinds)
        for name in (*_CALLING, *_HOLDING)
    ]


def _as_found(read: Read, contents: Contents) -> bool:
    """Whether the run read an attribute before it wrote it: the recorded value is still that of the model."""
    return read.kind in ("attribute", "slot") and contents.same(read.value, current(*read[:3]))


def _is_read(read: Read, reads: Reads) -> bool:
    return read.kind == "computed" or read.outer in reads.values


def _others(numbers: Iterable[ComparedNumber]) -> dict[int, dict[int, Callable[[Any], bool]]]:
    """The checks of numbers that may change inside holders, by the holder's id and the item's index (``Contents.others``)."""
    found: dict[int, dict[int, Callable[[Any], bool]]] = {}
    for read, comparisons in numbers:
        _, holder, key = read.own
        found.setdefault(id(holder), {})[index_of(holder, key)] = comparisons.hold
    return found


def _same(contents: Contents, kept: Any, value: Any, met: Met) -> bool:
    return kept.hold(value) if type(kept) in CONDITIONS else contents.same(kept, value, met)


def _wiring(modules: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """The wiring of each module, in the order of ``_REWIRED``. Hooks of the model itself run outside its planned forward."""
    root = modules[0]
    return [
        (
            type(module),
            (module,),  # a tuple, so that identity counts, whatever ``__eq__`` the module has
            () if module is root else hooks_of(module),
            [*module._modules.items()],
            compiled_attributes(module),
        )
        for module in modules
    ]


def _rewired(wiring: Sequence[Any], modules: Sequence[nn.Module]) -> Iterator[str]:
    """Describe the changes in how modules are wired."""
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

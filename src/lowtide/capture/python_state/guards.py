"""What a program depends on that no argument of the call shows: what the model's Python code read while it was captured.

``Guards`` keeps the values that were read (``python_state.observe``) and how the model's modules were put together, and tells
before each planned call whether all of it is still so: numbers, strings and holders (``program.objects``) are compared by
what they are or hold, everything else is the very same object. Where nothing has changed, ``python_state.quick`` says so in
some ten nanoseconds a value.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state import files
from lowtide.capture.python_state.external_effects import hooks_of
from lowtide.capture.python_state.paths import AttributePath, locate, named, value_at
from lowtide.capture.python_state.quick import Unchanged
from lowtide.capture.python_state.reads import Content, Read, Reads, put_together
from lowtide.program import structure
from lowtide.program.keys import tensor_key
from lowtide.program.objects import ABSENT, PLAIN, content, current, part_name, reachable

_REWIRED = ("is a {}", "is another {}", "has other hooks", "has other submodules")
_MOST_REMAKES = 8  # of the quick function, where equal values are put anew before each call


@dataclass(frozen=True, slots=True, eq=False)
class Guards:
    """``wiring``: of the modules, in order, see ``_wiring``. ``contents``: of holders that were read, by their ids. ``free``:
    ids of holders that may hold anything; ``layouts``: of tensors, by their ids, whose layout alone matters."""

    wiring: Sequence[tuple[Any, ...]] = ()
    reads: tuple[Read, ...] = ()
    contents: Mapping[int, Content] = field(default_factory=dict)
    hidden: tuple[tuple[nn.Module, list[Any]], ...] = ()
    files: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    layouts: Mapping[int, Any] = field(default_factory=dict)
    _quick: list[Unchanged] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        reads: Reads,
        free: Collection[AttributePath] = (),
        followed: Sequence[torch.Tensor] = (),
        after: Collection[tuple[AttributePath, Any]] = (),
    ) -> Guards:
        """Of what was read, what must stay as it was. ``free``: attributes that may be anything; ``followed``: tensors whose
        layout alone matters; ``after``: other values than the model has now. What the forward pass changes outside of the model
        is no condition: it would not hold for the next call."""
        contents = dict(reads.contents)
        open_holders = {id(holder) for place in free for holder in _holders(value_at(model, place))}
        instead: dict[tuple[int, str], Any] = {}
        for place, value in after:
            instead[_owned(model, place)] = value
            _keep(value, contents)
        anything = {_owned(model, place) for place in (("", "forward"), *free)}
        layouts = {id(tensor): tensor_key(tensor) for tensor in followed}
        guards = cls((), (), contents, (), {}, frozenset(open_holders), layouts)
        kept = []
        for read in reads.values.values():
            key = id(read.owner), read.name
            if (key in anything and read.kind != "method") or not guards.same(read.value, current(*read[:3])):
                continue
            kept.append(read._replace(value=instead[key]) if key in instead else read)
        return cls(
            _wiring(list(model.modules())),
            tuple(kept),
            contents,
            tuple(reads.hidden.values()),
            {path: state for path, state in reads.files.items() if files.state_of(path) == state},
            guards.free,
            layouts,
        )

    def hold(self, modules: Sequence[nn.Module]) -> bool:
        """Whether everything is as it was; ``modules`` are all of the model's."""
        if self._quick and self._quick[-1]():
            return True
        if next(self._broken(modules), None) is not None:
            return False
        if len(self._quick) < _MOST_REMAKES:
            self._quick.append(Unchanged(modules, self.reads, self.free, self.layouts, self.hidden, self.files))
        return True

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

    def _broken(self, modules: Sequence[nn.Module]) -> Iterator[tuple[str, Read | None]]:
        yield from ((text, None) for text in _rewired(self.wiring, modules))
        for read in self.reads:
            value = current(*read[:3])
            if not self.same(read.value, value):
                yield f"{read.text}{self._difference(read.value, value)}", read
        for module, parts in self.hidden:
            if not _identical(parts, put_together(module)):
                yield f"{type(module).__name__} has other parameters, buffers, hooks or submodules", None
        for path, state in self.files.items():
            if files.state_of(path) != state:
                yield f"the file {path} is another one", None

    def same(self, kept: Any, value: Any, met: set[tuple[int, int]] | None = None) -> bool:
        """Whether a value is to the program what ``kept`` was."""
        if id(kept) in self.layouts:
            return isinstance(value, torch.Tensor) and tensor_key(value) == self.layouts[id(kept)]
        known = self.contents.get(id(kept))
        if known is None or known.holder is not kept:
            return kept is value or _equal(kept, value)
        if type(value) is not type(kept):
            return False
        if kept is value and id(kept) in self.free:
            return True
        met = set() if met is None else met
        if (id(kept), id(value)) in met:
            return True
        met.add((id(kept), id(value)))
        items = content(value)
        if items is None or len(items) != len(known.items):
            return False
        return all(self.same(one, other, met) for one, other in zip(known.items, items, strict=True))

    def _difference(self, kept: Any, value: Any) -> str:
        """In words, where in two values that are not the same the difference lies."""
        known = self.contents.get(id(kept))
        items = content(value) if known is not None and type(value) is type(kept) else None
        if known is None or items is None or isinstance(kept, np.ndarray) or len(items) != len(known.items):
            return f" is {_shown(value)}"
        pairs = enumerate(zip(known.items, items, strict=True))
        index, (one, other) = next((i, pair) for i, pair in pairs if not self.same(*pair))
        return f"{part_name(value, index)}{self._difference(one, other)}"


def _keep(value: Any, contents: dict[int, Content]) -> None:
    """Add what holders in ``value`` hold."""
    for holder in _holders(value):
        contents[id(holder)] = Content(holder, content(holder) or ())


def _holders(value: Any) -> list[Any]:
    """The holders that it is, and those in them."""
    return [one for one in reachable([value], lambda one: content(one) is not None) if content(one) is not None]


def _equal(kept: Any, value: Any) -> bool:
    if isinstance(kept, types.MethodType) and isinstance(value, types.MethodType):  # made anew where they are read
        return kept.__func__ is value.__func__ and kept.__self__ is value.__self__
    if type(kept) is not type(value) or not isinstance(kept, (*PLAIN, np.generic)):
        return False
    if isinstance(kept, float) and kept == 0:
        return str(kept) == str(value)  # of both signs
    return bool(kept == value or (kept != kept and value != value))


def _owned(model: nn.Module, place: AttributePath) -> tuple[int, str]:
    owner, name = locate(model, place) or (None, "")
    return id(owner), name


def _wiring(modules: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """Of each module what ``_REWIRED`` names. Class and hooks of the model itself are around its planned forward."""
    root = modules[0]
    return [
        (
            None if module is root else type(module),
            module,
            () if module is root else hooks_of(module),
            [*module._modules.items()],
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


def _identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    return repr(value) if isinstance(value, PLAIN) else f"another {type(value).__name__}"

"""The quick check of guards: compare everything that a program read by identity, in some ten nanoseconds a value.

If an equal but different object has replaced a value, the answer is no. The full guards then compare values, and make a new
quick check with the new objects.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.guards.external_effects import HOOKS, hooks_of
from lowtide.capture.python_state.guards.files import Watched
from lowtide.capture.python_state.guards.forms import CONDITIONS
from lowtide.capture.python_state.guards.reads import Contents, Read, compiled_attributes, put_together
from lowtide.native import core
from lowtide.objects import opaque
from lowtide.objects.keys import tensor_key
from lowtide.objects.places import READERS, current, index_of
from lowtide.objects.walk import ABSENT, content, own_attributes

_IMMUTABLE = (tuple, frozenset, types.MethodType, types.BuiltinMethodType, functools.partial, *opaque.FIXED)
_IN_DICT = operator.attrgetter("__dict__")
_IN_ORDER = operator.methodcaller("values")  # dict.values would not see that an OrderedDict was reordered
_EXACT = frozenset((bytes, str, int))  # equal values of these types are interchangeable
_MADE_ANEW = ("answer", "layout", "values", "subclasses")  # kinds of reads that create a new object each time
_CHANGED = (KeyError, AttributeError, ValueError, RuntimeError, ReferenceError)


_ANY = object()  # stands for a number that is checked separately


class _Layout(tuple[Any, ...]):
    """Stands for any tensor with this layout key."""


class Unchanged:
    """A callable check: true if modules are wired as at construction, and all ``reads`` still find the same objects."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        reads: Sequence[Read],
        contents: Contents,
        hidden: Iterable[tuple[nn.Module, list[Any]]],
        opened: Mapping[Watched, Any],
    ) -> None:
        self._layouts = {key: _Layout(layout) for key, layout in contents.layouts.items()}
        # By function: expected results and the arguments that give them.
        self._rows: dict[Callable[..., Any], dict[Any, tuple[Any, ...]]] = {}
        self._absent: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}  # names that must stay absent
        self._items: list[tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]]] = []
        self._files = dict(opened)
        self._wire(modules)
        values = [self._read(read, current(*read[:3])) for read in reads]
        self._others = {(id(own[1]), index_of(*own[1:])) for own in (one.own for one in reads if one.kind == "part")}
        self._hold(values, contents.free)
        self._items += [(put_together, (module,), parts) for module, parts in hidden]
        self._identities = [*self._compiled()]
        self._columns: list[Any] = [(function, *_columns(rows, 2)) for function, rows in self._rows.items()]

    def _compiled(self) -> Iterator[tuple[Callable[..., bool], tuple[Any, ...]]]:
        """Yield the checks done by the compiled core, with their arguments, and remove their rows."""
        types, owners = _columns(self._rows.pop(type, {}), 2)
        yield core.are_of_types, (owners, types)
        dictionaries, owners = _columns(self._rows.pop(_IN_DICT, {}) | self._rows.pop(own_attributes, {}), 2)
        yield core.have_dictionaries, (owners, dictionaries)
        values, holders, names = _columns(self._rows.pop(getattr, {}), 3)
        yield core.have_attributes, (holders, names, values)
        items, mappings, keys = _columns(self._rows.pop(operator.getitem, {}), 3)
        yield core.have_items, (mappings, keys, items)
        yield core.have_no_items, _columns(self._absent, 2)
        yield core.are_empty, (tuple(self._empty),)
        yield core.have_values, (tuple(self._filled), tuple(_values(*self._filled)))

    def __call__(self) -> bool:
        try:
            return (
                all(same(*arguments) for same, arguments in self._identities)
                and all(
                    all(map(operator.is_, map(function, *arguments), found))
                    for function, found, *arguments in self._columns
                )
                and all(_same_items(function(*arguments), items) for function, arguments, items in self._items)
                and all(file.state() == state for file, state in self._files.items())
            )
        except _CHANGED:
            return False

    def _expect(self, found: Any, function: Callable[..., Any], *arguments: Any) -> None:
        self._rows.setdefault(function, {})[tuple(map(id, arguments))] = (found, *arguments)

    def _stands(self, found: Any, own: Mapping[str, Any], name: str) -> None:
        """Expect ``found`` under ``name`` in ``own``, or its absence."""
        if found is ABSENT:
            self._absent[id(own), name] = (own, name)
        else:
            self._expect(found, operator.getitem, own, name)

    def _wire(self, modules: Sequence[nn.Module]) -> None:
        """Expect the modules' classes, ordered children and hooks. The model's own hooks run outside its planned forward."""
        inner = modules[1:]
        registries = [module._modules for module in modules]
        for module in inner:
            hooks = [vars(module)[name] for name in HOOKS]
            if any(hooks):
                self._items.append((hooks_of, (module,), hooks_of(module)))
            else:
                registries += hooks
        self._empty: list[Any] = [registry for registry in registries if not registry]
        self._filled: list[Any] = [registry for registry in registries if registry and type(registry) is dict]
        ordered = tuple(registry for registry in registries if registry and type(registry) is not dict)
        if ordered:
            self._items.append((_values, ordered, _values(*ordered)))
        for module in modules:
            self._expect(type(module), type, module)
            if module._modules:  # ``ModuleList`` replaces this dictionary when it removes an item
                self._expect(module._modules, operator.getitem, vars(module), "_modules")
            for name, child in module._modules.items():
                self._expect(child, operator.getitem, module._modules, name)
            if isinstance(module, torch.jit.ScriptModule):
                self._items.append((compiled_attributes, (module,), compiled_attributes(module)))

    def _read(self, read: Read, value: Any) -> Any:
        kind, owner, name = read[:3]
        own = owner if kind == "item" else None
        if kind == "attribute" or (kind == "names" and not isinstance(owner, nn.Module)):
            own = own_attributes(owner)
        if type(read.value) in CONDITIONS:
            self._items.append((_compared, (read.value.hold, kind, owner, name), [True]))
            return None
        if id(value) in self._layouts or kind in _MADE_ANEW:
            self._items.append((_single, (kind, owner, name), [self._layouts.get(id(value), value)]))
        elif kind == "names" and own is None:
            self._items.append((current, (kind, owner, name), value))
        elif kind == "names":
            self._items.append((tuple, (own,), value)) if value else self._empty.append(own)
            self._expect(own, own_attributes, owner)
        elif kind == "cell" and value is not ABSENT:
            self._expect(value, getattr, owner, "cell_contents")
        elif kind == "type":
            self._expect(value, type, owner)
        elif own is not None:
            if own is not owner:
                self._expect(own, _IN_DICT if isinstance(owner, nn.Module) else own_attributes, owner)
            self._stands(value, own, name)
        elif kind == "class":
            for base in owner.__mro__:
                found = vars(base).get(name, ABSENT)
                self._stands(found, _namespace(base), name)
                if found is not ABSENT:
                    break
        else:
            self._expect(value, READERS[kind], owner, name)
        return value

    def _hold(self, values: list[Any], free: Collection[int]) -> None:
        """Expect the current content of the holders among ``values``, recursively."""
        met: dict[int, Any] = {}
        while values:
            holder = values.pop()
            items = None if id(holder) in met or id(holder) in free else content(holder)
            if items is not None:
                met[id(holder)] = holder
                values += items
                expected = [
                    _ANY if (id(holder), index) in self._others else self._layouts.get(id(item), item)
                    for index, item in enumerate(items)
                ]
                if not isinstance(holder, _IMMUTABLE) or any(type(item) is _Layout for item in expected):
                    self._items.append((content, (holder,), expected))


@functools.lru_cache(maxsize=1 << 12)
def _namespace(kind: type) -> Any:
    """The namespace of a class, cached because ``vars`` creates a new view in each call."""
    return vars(kind)


def _columns(rows: Mapping[Any, tuple[Any, ...]], width: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*rows.values(), strict=True)) or ((),) * width


def _values(*registries: dict[str, Any]) -> list[Any]:
    return [*itertools.chain.from_iterable(map(_IN_ORDER, registries))]


def _compared(holds: Callable[[Any], bool], kind: str, owner: Any, name: str) -> list[Any]:
    return [holds(current(kind, owner, name))]


def _single(kind: str, owner: Any, name: str) -> list[Any]:
    return [current(kind, owner, name)]


def _same_items(now: Sequence[Any] | None, before: Sequence[Any]) -> bool:
    return (
        now is not None
        and len(now) == len(before)
        and (all(map(operator.is_, now, before)) or all(map(_same_item, now, before)))
    )


def _same_item(one: Any, other: Any) -> bool:
    if type(other) is _Layout:
        return isinstance(one, torch.Tensor) and tensor_key(one) == other
    if one is other or other is _ANY:
        return True
    if type(one) is not type(other):
        return False
    return _same_items(one, other) if type(other) is tuple else type(other) in _EXACT and bool(one == other)

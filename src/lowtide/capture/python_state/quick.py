"""One function that says whether nothing that a program read has changed, made of a line per value.

It compares identities alone, and takes some ten nanoseconds a line: where an equal value has taken another one's place it says
no, and the guards look closer and have it made anew.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state import files
from lowtide.capture.python_state.external_effects import HOOKS
from lowtide.capture.python_state.observe import Read
from lowtide.program import structure
from lowtide.program.keys import tensor_key
from lowtide.program.objects import ABSENT, class_attribute, content, current, own_attributes

_IMMUTABLE = (tuple, frozenset, types.MethodType, types.BuiltinMethodType, functools.partial)
_LINES = 200  # in one condition
_children = operator.itemgetter("_modules")


class _Conditions:
    """Lines of code that must all be true, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}  # each once, in order
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {"all_same": _all_same, "call": _call, "same_layout": _same_layout}

    def name(self, value: Any) -> str:
        """The name under which the code finds an object."""
        name = self._names.setdefault(id(value), f"o{len(self._names)}")
        self._objects[name] = value
        return name

    def add(self, line: str, **objects: Any) -> None:
        """A line, with the names of ``objects`` put in."""
        self.lines[line.format(**{key: self.name(value) for key, value in objects.items()})] = None

    def compiled(self) -> Callable[[], bool]:
        lines = list(self.lines)
        parts = [lines[start : start + _LINES] for start in range(0, len(lines), _LINES)]
        body = "".join(f"        if not ({' and '.join(part)}): return False\n" for part in parts)
        source = (
            f"def holds({', '.join(self._objects)}):\n    try:\n{body}        return True\n"
            "    except (KeyError, AttributeError, ValueError, RuntimeError, ReferenceError): return False\n"
        )
        scope: dict[str, Any] = {}
        exec(compile(source, "<guards>", "exec"), scope)
        scope["holds"].__defaults__ = tuple(self._objects.values())
        holds: Callable[[], bool] = scope["holds"]
        return holds


def compile_guards(
    modules: Sequence[nn.Module],
    reads: Iterable[Read],
    free: Collection[int],
    layouts: Mapping[int, Any],
    hidden: Iterable[tuple[nn.Module, list[torch.Tensor]]],
    opened: Mapping[str, Any],
) -> Callable[[], bool]:
    """The function, for modules that are wired as they should be and ``reads`` of what is there now."""
    conditions = _Conditions()
    _add_wiring(conditions, modules)
    values: list[Any] = []
    for read in reads:
        value = current(*read[:3])
        _add_read(conditions, read, value, layouts)
        values.append(value)
    _add_contents(conditions, values, free, layouts)
    for module, tensors in hidden:
        conditions.add(
            "call(all_same, call({state}, {module}), {tensors})",
            state=structure.state_of,
            module=module,
            tensors=tensors,
        )
    for path, state in opened.items():
        conditions.add("call({state_of}, {path}) == {state}", state_of=files.state_of, path=path, state=state)
    return conditions.compiled()


def _add_wiring(conditions: _Conditions, modules: Sequence[nn.Module]) -> None:
    """Classes, children in their order, and that there are no more hooks; the model's own are around its planned forward."""
    inner = modules[1:]
    conditions.add("tuple(map(type, {modules})) == {kinds}", modules=inner, kinds=tuple(map(type, inner)))
    parents = [vars(module) for module in modules if module._modules]
    conditions.add(
        "tuple(map(tuple, map({values}, map({get}, {parents})))) == {children}",
        values=dict.values, get=_children, parents=parents, children=tuple(tuple(one["_modules"].values()) for one in parents),
    )  # fmt: skip
    empty: list[Any] = [module._modules for module in modules if not module._modules]
    for module in inner:
        for hooks in (vars(module)[name] for name in HOOKS):
            if hooks:
                conditions.add("tuple({hooks}.values()) == {now}", hooks=hooks, now=tuple(hooks.values()))
            else:
                empty.append(hooks)
    conditions.add("not any({empty})", empty=empty)


def _add_read(conditions: _Conditions, read: Read, value: Any, layouts: Mapping[int, Any]) -> None:
    kind, owner, name = read[:3]
    own = own_attributes(owner) if kind in ("attribute", "names") else owner if kind == "item" else None
    if id(value) in layouts:
        conditions.add(
            "same_layout(call({current}, {kind}, {owner}, {name}), {layout})",
            current=current, kind=kind, owner=owner, name=name, layout=layouts[id(value)],
        )  # fmt: skip
    elif kind == "names" and own is not None:
        conditions.add("tuple({own}) == {value}", own=own, value=value)
    elif own is not None:
        if not isinstance(owner, (nn.Module, dict)):
            conditions.add("call({get}, {owner}) is {own}", get=_dictionary_of(type(owner)), owner=owner, own=own)
        present = f"{{own}}[{name!r}] is {{value}}" if value is not ABSENT else f"{name!r} not in {{own}}"
        conditions.add(present, own=own, value=value)
    elif kind == "class":
        _add_class_attribute(conditions, owner, name, value)
    elif kind == "type":
        conditions.add("type({owner}) is {value}", owner=owner, value=value)
    elif kind == "cell" and value is not ABSENT:
        conditions.add("{owner}.cell_contents is {value}", owner=owner, value=value)
    else:
        conditions.add(
            "call({current}, {kind}, {owner}, {name}) is {value}",
            current=current,
            kind=kind,
            owner=owner,
            name=name,
            value=value,
        )


def _add_class_attribute(conditions: _Conditions, kind: type, name: str, value: Any) -> None:
    for base in kind.__mro__:
        if name in vars(base):
            conditions.add(f"{{own}}[{name!r}] is {{value}}", own=vars(base), value=value)
            return
        conditions.add(f"{name!r} not in {{own}}", own=vars(base))


def _dictionary_of(kind: type) -> Callable[[Any], Any]:
    """What reads the dictionary of an object, past what its class makes of reading."""
    get: Callable[[Any], Any] = class_attribute(kind, "__dict__").__get__
    return get


def _add_contents(
    conditions: _Conditions, values: list[Any], free: Collection[int], layouts: Mapping[int, Any]
) -> None:
    """That holders hold what they do, and those in them."""
    met: dict[int, Any] = {}
    while values:
        holder = values.pop()
        items = None if id(holder) in met or id(holder) in free else content(holder)
        if items is None:
            continue
        met[id(holder)] = holder
        values += items
        if layouts and any(id(item) in layouts for item in items):
            layout = [layouts.get(id(item), ABSENT) for item in items]
            conditions.add(
                "call({check}, call({content}, {holder}), {items}, {layout})",
                check=_same_or_layout, content=content, holder=holder, items=items, layout=layout,
            )  # fmt: skip
        elif isinstance(holder, _IMMUTABLE):
            continue
        elif not items:
            conditions.add(
                "not {holder}" if isinstance(holder, (list, dict, deque, set)) else "not call({content}, {holder})",
                holder=holder,
                content=content,
            )
        elif isinstance(holder, (list, deque)):
            conditions.add("all_same({holder}, {items})", holder=holder, items=items)
        elif isinstance(holder, dict) and not isinstance(holder, defaultdict):
            half = len(items) // 2
            conditions.add(
                "all_same({holder}, {keys}) and all_same({holder}.values(), {items})",
                holder=holder,
                keys=items[:half],
                items=items[half:],
            )
        else:
            conditions.add(
                "call({check}, call({content}, {holder}), {items})",
                check=_equal,
                content=content,
                holder=holder,
                items=items,
            )


def _all_same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and isinstance(a, (bytes, str, int, tuple)) and a == b)
        for a, b in zip(one, other, strict=True)
    )


def _same_or_layout(items: Sequence[Any], before: Sequence[Any], layouts: Sequence[Any]) -> bool:
    return len(items) == len(before) and all(
        item is was if layout is ABSENT else _same_layout(item, layout)
        for item, was, layout in zip(items, before, layouts, strict=True)
    )


def _same_layout(value: Any, layout: Any) -> bool:
    return isinstance(value, torch.Tensor) and tensor_key(value) == layout


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)

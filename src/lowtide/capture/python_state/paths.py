"""Paths to the attributes of a model: those of its modules, and those of objects that the modules hold."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture.sharded import is_bookkeeping
from lowtide.objects import structure
from lowtide.objects.walk import ABSENT, CONTAINERS, OWN, PLAIN, fields, is_open

_OF_HIDDEN = {"training", "_modules"}  # built-in attributes walked in modules that are not registered submodules
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOLDING = (*CONTAINERS, functools.partial, types.MethodType, types.BuiltinMethodType)
_PARTS = ("func", "args", "keywords", "__self__")  # of partials and bound methods
_SHOWN = 3

_WITHIN = "\0"  # separates the name of an attribute from the names of parts nested in its value

# A module's path and an attribute's name. For a nested part, names of the parts follow the attribute's, each after _WITHIN.
AttributePath = tuple[str, str]


def of_modules(model: nn.Module) -> Iterator[tuple[AttributePath, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "training" or (name not in OWN and name != "forward" and not is_bookkeeping(name)):
                yield (path, name), value


def attributes_of(model: nn.Module) -> Iterator[tuple[AttributePath, Any]]:
    """Yield the attributes of modules and of the objects that they hold. Each object is entered once."""
    return ((place, value) for place, value, _ in with_owners(model))


def with_owners(model: nn.Module, entered: list[Any] | None = None) -> Iterator[tuple[AttributePath, Any, Any]]:
    """Yield place, value and owner of each attribute (``attributes_of``). The owner is the object that has the attribute, or
    ``None`` for a module of the model. All objects and containers searched are appended to ``entered``."""
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    waiting: deque[tuple[AttributePath, Any, bool, Any]] = deque(
        (place, value, True, None) for place, value in of_modules(model)
    )
    waiting += [
        ((path, name), vars(module)[name], False, None)
        for path, module in [*model.named_modules()][1:]
        for name in FORWARD_HOOKS
    ]
    while waiting:
        place, value, is_attribute, owner = waiting.popleft()
        if is_attribute:
            yield place, value, owner
        held, hidden = isinstance(value, HOLDING), isinstance(value, nn.Module)
        if isinstance(value, PLAIN) or id(value) in seen or not (held or hidden or is_open(value)):
            continue
        seen[id(value)] = value
        if entered is not None:
            entered.append(value)
        for name, item in _parts(value).items():
            if hidden and (is_bookkeeping(name) or name in OWN - _OF_HIDDEN):
                continue
            of_object = not held and not (hidden and name == "_modules")
            if of_object or not isinstance(item, PLAIN):
                waiting.append(((place[0], f"{place[1]}{_WITHIN}{name}"), item, of_object, value))


def enclosing(place: AttributePath) -> Iterator[AttributePath]:
    """The places of the objects and containers around a place, outermost first."""
    parts = place[1].split(_WITHIN)
    return ((place[0], _WITHIN.join(parts[:count])) for count in range(1, len(parts)))


def is_within(place: AttributePath) -> bool:
    """Whether a place is inside an object that a module holds, not an attribute of the module itself."""
    return _WITHIN in place[1]


def parts_of_holder(value: Any) -> list[Any]:
    """The items of a container (keys of a dictionary included), or the parts of a bound method or partial."""
    keys = [*value] if isinstance(value, dict) else []
    return [*keys, *_parts(value).values()]


def locate(model: nn.Module, place: AttributePath) -> tuple[Any, str] | None:
    """The module or object that has the attribute, and the attribute's own name; ``None`` if that object is gone."""
    owner: Any = model
    for name in place[0].split(".") if place[0] else ():
        owner = owner._modules[name]
    *objects, leaf = place[1].split(_WITHIN)
    for name in objects:
        owner = _parts(owner).get(name)
    return None if owner is None else (owner, leaf)


def owned(model: nn.Module, place: AttributePath) -> tuple[int, str]:
    """The id of the module or object that has the attribute, and the attribute's own name."""
    owner, name = locate(model, place) or (None, "")
    return id(owner), name


def value_at(model: nn.Module, place: AttributePath) -> Any:
    located = locate(model, place)
    return ABSENT if located is None else _parts(located[0]).get(located[1], ABSENT)


def _parts(owner: Any) -> dict[str, Any]:
    """The attributes of a module or object, or the items of a container, by name."""
    if isinstance(owner, nn.Module):
        return vars(owner)
    if isinstance(owner, dict):
        keys = {f"key {number}": key for number, key in enumerate(owner) if not isinstance(key, PLAIN)}
        return {repr(key): item for key, item in owner.items()} | keys
    if isinstance(owner, CONTAINERS):
        return {str(number): item for number, item in enumerate(owner)}
    if isinstance(owner, HOLDING):
        return {name: getattr(owner, name) for name in _PARTS if hasattr(owner, name)}
    return fields(owner)


def set_at(model: nn.Module, place: AttributePath, value: Any) -> None:
    located = locate(model, place)
    if located is None:
        return
    owner, name = located
    if value is ABSENT:
        with contextlib.suppress(AttributeError):
            delattr(owner, name)
    elif isinstance(owner, nn.Module):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return structure.flatten(value)[0]


def texts(places: Sequence[AttributePath]) -> str:
    return named([f"{path}.{name}".lstrip(".").replace(_WITHIN, ".") for path, name in places])


def sharing(model: nn.Module, places: Collection[AttributePath]) -> list[AttributePath]:
    """The ``places``, and other module attributes whose value is the same container as at one of them."""
    held = {id(value) for value in (value_at(model, place) for place in places) if isinstance(value, CONTAINERS)}
    return [*places, *(place for place, value in of_modules(model) if id(value) in held and place not in places)]


def root(place: AttributePath) -> AttributePath:
    """The module attribute that a place is, or is nested in."""
    return place[0], place[1].split(_WITHIN)[0]


def leaf(place: AttributePath) -> str:
    """The attribute's own name."""
    return place[1].split(_WITHIN)[-1]


def named(names: Sequence[str]) -> str:
    """The first few names, joined for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""Where attributes of a model are: of its modules, and of objects that they hold."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture import structure

OWN = frozenset(vars(nn.Module()))  # what every module has
DEPTH = 3  # of objects in objects
MOST_OBJECTS = 256  # that are looked into
MOST_BYTES = 1 << 24  # of an array that is compared
_SHOWN = 3

Place = tuple[str, str]  # the path of a module, and the name of its attribute; "name.field" of an object that it holds


class _Absent(enum.Enum):
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT  # instead of the value of an attribute that is not there


def of_modules(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and name != "forward":
                yield (path, name), value


def attributes_of(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Those of modules, and of the objects that they hold; every object once."""
    seen: dict[int, Any] = {}
    for place, value in of_modules(model):
        yield place, value
        yield from _inside(place, value, DEPTH, seen)


def _inside(place: Place, value: Any, depth: int, seen: dict[int, Any]) -> Iterator[tuple[Place, Any]]:
    if depth == 0 or len(seen) == MOST_OBJECTS or id(value) in seen or not structure.is_open(value):
        return
    seen[id(value)] = value
    for name, field in structure.fields(value).items():
        inner = (place[0], f"{place[1]}.{name}")
        yield inner, field
        yield from _inside(inner, field, depth - 1, seen)


def around(place: Place) -> Iterator[Place]:
    """The objects that it is in."""
    parts = place[1].split(".")
    return ((place[0], ".".join(parts[:count])) for count in range(1, len(parts)))


def locate(model: nn.Module, place: Place) -> tuple[Any, str] | None:
    """The module or object whose attribute it is, and the attribute's own name; ``None`` where there is no such object now."""
    owner: Any = model.get_submodule(place[0])
    if place[1] in vars(owner):
        return owner, place[1]
    *objects, leaf = place[1].split(".")
    for name in objects:
        owner = _fields(owner).get(name)
    return None if owner is None else (owner, leaf)


def value_at(model: nn.Module, place: Place) -> Any:
    located = locate(model, place)
    return ABSENT if located is None else _fields(located[0]).get(located[1], ABSENT)


def _fields(owner: Any) -> dict[str, Any]:
    return vars(owner) if isinstance(owner, nn.Module) else structure.fields(owner)


def set_at(model: nn.Module, place: Place, value: Any) -> None:
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


def texts(places: Sequence[Place]) -> str:
    return named([f"{path}.{name}" if path else name for path, name in places])


def named(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

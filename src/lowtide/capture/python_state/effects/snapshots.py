"""Snapshots of a model's attributes and their contents, to compare with or to restore."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.capture.python_state.guards.reads import Contents, identical
from lowtide.capture.python_state.paths import (
    HOLDING,
    AttributePath,
    attributes_of,
    is_within,
    leaf,
    owned,
    set_at,
    with_owners,
)
from lowtide.objects.walk import ABSENT, CONTAINERS, MUTABLE, content, fields, is_open, refill


class _Holder(NamedTuple):
    """A module, object or container in which attributes were found, and what it held ``then``."""

    owner: Any
    then: list[Any]

    @property
    def is_as_then(self) -> bool:
        return identical(_held(self.owner), self.then)


def _held(owner: Any) -> list[Any]:
    """The names or keys, and their values; without a planned ``forward``."""
    if isinstance(owner, nn.Module):
        own = vars(owner)
        own = own if "forward" not in own else {name: value for name, value in own.items() if name != "forward"}
    elif isinstance(owner, dict):
        own = owner
    elif isinstance(owner, CONTAINERS):
        return [*(content(owner) or ())]
    elif isinstance(owner, HOLDING):  # these are immutable
        return []
    else:
        own = fields(owner)
    return [*own, *own.values()]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The attributes of all modules of a model, and their contents. ``containers``: copies of mutable containers.
    ``of_objects``: attributes of objects, by the object's id and their own names, since an object is found by one
    path only. ``holders``: where the attributes were found."""

    attributes: dict[AttributePath, Any]
    contents: Contents
    modules: dict[str, tuple[nn.Module, type]]
    containers: dict[AttributePath, Any]
    of_objects: dict[tuple[int, str], Any]
    holders: list[_Holder]

    @property
    def is_current(self) -> bool:
        """Whether nothing has been written since, so that a new snapshot would be the same."""
        return all(holder.is_as_then for holder in self.holders)

    @property
    def holds_tensors(self) -> bool:
        return any(isinstance(one, torch.Tensor) for holder in self.holders for one in holder.then)

    def items_of(self, place: AttributePath, value: Any) -> Any:
        """A copy of the former content of the container at a place, if ``value`` is that container; else ``None``."""
        return self.containers.get(place) if self.attributes.get(place) is value else None

    def known(self, model: nn.Module, place: AttributePath) -> Any:
        """The former value at a place, by whichever path the model reached it; ``ABSENT`` if there was none."""
        if place in self.attributes or not is_within(place):
            return self.attributes.get(place, ABSENT)
        return self.of_objects.get(owned(model, place), ABSENT)

    def differs(self, model: nn.Module, place: AttributePath, value: Any) -> bool:
        """Whether there was another value, or the same one with another content."""
        known = self.known(model, place)
        return known is ABSENT or not self.contents.same(known, value)


def snapshot(model: nn.Module) -> Snapshot:
    entered: list[Any] = [each._modules for each in model.modules()]
    entered += model.modules()
    every, contents = [*with_owners(model, entered)], Contents()
    found = {place: value for place, value, _ in every}
    contents.keep(found.values(), entered=lambda one: not is_open(one))  # attributes are places themselves
    containers = {place: copy.copy(value) for place, value in found.items() if isinstance(value, MUTABLE)}
    of_objects = {(id(owner), leaf(place)): value for place, value, owner in every if owner is not None}
    holders = [_Holder(owner, _held(owner)) for owner in entered]
    return Snapshot(found, contents, modules_of(model), containers, of_objects, holders)


def put_back(model: nn.Module, before: Snapshot) -> None:
    """Restore the attributes and their contents."""
    if before.is_current:
        return
    found = dict(attributes_of(model))
    for place in [place for place in found if before.known(model, place) is ABSENT]:
        set_at(model, place, ABSENT)
    for place, value in before.attributes.items():
        if found.get(place, ABSENT) is not value:
            set_at(model, place, value)
        if place in before.containers:
            refill(value, before.containers[place])


def modules_of(model: nn.Module) -> dict[str, tuple[nn.Module, type]]:
    return {name: (module, type(module)) for name, module in model.named_modules(remove_duplicate=False)}

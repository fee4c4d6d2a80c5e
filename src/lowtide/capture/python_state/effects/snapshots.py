"""What the attributes of a model are, and what is in them, to be compared with or put back."""

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
    """A module, an object or a container that attributes were found in, and what it held."""

    owner: Any
    then: list[Any]

    @property
    def is_as_then(self) -> bool:
        return identical(_held(self.owner), self.then)


def _held(owner: Any) -> list[Any]:
    """Names or keys, and what they stand for; not the ``forward`` that a plan stands in for."""
    if isinstance(owner, nn.Module):
        own = vars(owner)
        own = own if "forward" not in own else {name: value for name, value in own.items() if name != "forward"}
    elif isinstance(owner, dict):
        own = owner
    elif isinstance(owner, CONTAINERS):
        return [*(content(owner) or ())]
    elif isinstance(owner, HOLDING):  # which cannot be written
        return []
    else:
        own = fields(owner)
    return [*own, *own.values()]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The attributes of all modules of a model, and what was in them. ``containers``: copies of those that can be written in
    place; ``of_objects``: those of objects, by the object's id and their own names, since an object is met by one way alone.
    ``holders``: where they were found."""

    attributes: dict[AttributePath, Any]
    contents: Contents
    modules: dict[str, tuple[nn.Module, type]]
    containers: dict[AttributePath, Any]
    of_objects: dict[tuple[int, str], Any]
    holders: list[_Holder]

    @property
    def is_current(self) -> bool:
        """Whether nothing that can be written has been, so that another snapshot would be the same."""
        return all(holder.is_as_then for holder in self.holders)

    @property
    def holds_tensors(self) -> bool:
        return any(isinstance(one, torch.Tensor) for holder in self.holders for one in holder.then)

    def items_of(self, place: AttributePath, value: Any) -> Any:
        """A copy of the container there, where it is this one; ``None`` otherwise."""
        return self.containers.get(place) if self.attributes.get(place) is value else None

    def known(self, model: nn.Module, place: AttributePath) -> Any:
        """What was there, by whatever way the model came to it; or that nothing was."""
        if place in self.attributes or not is_within(place):
            return self.attributes.get(place, ABSENT)
        return self.of_objects.get(owned(model, place), ABSENT)

    def differs(self, model: nn.Module, place: AttributePath, value: Any) -> bool:
        """Whether there is another value than this one was, or another one in it."""
        known = self.known(model, place)
        return known is ABSENT or not self.contents.same(known, value)


def snapshot(model: nn.Module) -> Snapshot:
    entered: list[Any] = [each._modules for each in model.modules()]
    entered += model.modules()
    every, contents = [*with_owners(model, entered)], Contents()
    found = {place: value for place, value, _ in every}
    contents.keep(found.values(), entered=lambda one: not is_open(one))  # whose attributes are places of their own
    containers = {place: copy.copy(value) for place, value in found.items() if isinstance(value, MUTABLE)}
    of_objects = {(id(owner), leaf(place)): value for place, value, owner in every if owner is not None}
    holders = [_Holder(owner, _held(owner)) for owner in entered]
    return Snapshot(found, contents, modules_of(model), containers, of_objects, holders)


def put_back(model: nn.Module, before: Snapshot) -> None:
    """Let the attributes be what they were, and hold what they held."""
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

"""Tensors in plain attributes: constants of a program, unless they are followed.

Followed tensors are inputs. They may be other tensors in each call, as long as their layout stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.paths import (
    FORWARD_HOOKS,
    HOLDING,
    AttributePath,
    of_modules,
    root,
    tensors_in,
    value_at,
)
from lowtide.errors import CaptureError
from lowtide.objects.walk import is_open, reachable
from lowtide.program.layouts import memory_of


@dataclass(frozen=True, slots=True)
class HeldInputs:
    """Tensors in attributes that are the last flat inputs of a program. ``places[i]``: where the i-th tensor is:
    attributes, and its number among the tensors in each. ``unread``: those that the program does not read."""

    places: tuple[tuple[tuple[AttributePath, int], ...], ...] = ()
    unread: frozenset[int] = frozenset()

    def attributes(self) -> frozenset[AttributePath]:
        return frozenset(place for everywhere in self.places for place, _ in everywhere)

    def behind(self, inputs: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor] | None:
        """The flat inputs followed by the present tensors, with empty ones for those that are not read. ``None`` if
        some are missing, or differ between their places."""
        found: dict[AttributePath, list[torch.Tensor]] = {}
        result = list(inputs) if self.places else inputs
        for number, everywhere in enumerate(self.places):
            if number in self.unread:
                result.append(torch.empty(0))
                continue
            for place, _ in everywhere:
                if place not in found:
                    found[place] = tensors_in(value_at(model, place))
            tensors = [found[place][index] if index < len(found[place]) else None for place, index in everywhere]
            if tensors[0] is None or any(tensor is not tensors[0] for tensor in tensors):
                return None
            result.append(tensors[0])
        return result


def inputs_at(
    model: nn.Module, places: Collection[AttributePath], state: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], HeldInputs]:
    """The tensors at ``places`` that are not in ``state``, with all places where each of them lies. Behind them come views of
    ``state`` and tensors that require gradients, wherever they lie."""
    known = set(map(id, state))
    found = [(place, index, t) for place, value in of_modules(model) for index, t in enumerate(tensors_in(value))]
    roots, shared = set(map(root, places)), set(map(memory_of, state))
    asked = {id(t): t for place, _, t in found if place in roots and id(t) not in known}
    others = {id(t): t for _, _, t in found if (t.requires_grad or memory_of(t) in shared) and id(t) not in known}
    wanted = {**asked, **others}
    everywhere = (tuple((place, index) for place, index, t in found if id(t) == key) for key in wanted)
    return list(wanted.values()), HeldInputs(tuple(everywhere))


def followed_inputs(
    model: nn.Module, follow: frozenset[AttributePath] | HeldInputs, state: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], HeldInputs]:
    """``inputs_at`` these attributes, or at the places in another program. Raises ``CaptureError`` if they are not
    there."""
    if not isinstance(follow, HeldInputs):
        return inputs_at(model, follow, state)
    held = follow.behind([], model)
    if held is None:
        raise CaptureError("tensors in the model's attributes are not where they were when it was called.")
    return held, follow


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All tensors in plain attributes and forward hooks, including those in containers, objects, partial functions, and
    modules that are not registered."""
    registered = set(map(id, model.modules()))
    hooks = [vars(module)[name] for module in model.modules() for name in FORWARD_HOOKS]

    def enter(value: Any) -> bool:
        hidden = isinstance(value, nn.Module) and id(value) not in registered
        return hidden or isinstance(value, HOLDING) or is_open(value)

    found = reachable([*hooks, *(value for _, value in of_modules(model))], enter)
    return [one for one in found if isinstance(one, torch.Tensor)]


def holding(model: nn.Module, tensor: torch.Tensor) -> frozenset[AttributePath]:
    """The attributes that contain this tensor, or one that shares its memory."""
    storage = memory_of(tensor)
    return frozenset(p for p, value in of_modules(model) if any(memory_of(t) == storage for t in tensors_in(value)))

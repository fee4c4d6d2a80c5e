"""What ran in a step, and the gradients that it leaves behind in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lowtide.planning import Plan
from lowtide.runtime.entry import Entry
from lowtide.runtime.step import ModelCall


class Replannable(Protocol):
    """A graph whose programs can be given other plans."""

    def replan(self, plans: Mapping[Entry, Plan]) -> None:
        """Run these by other plans from now on."""


@dataclass(frozen=True, slots=True, eq=False)
class LeftGradient:
    """A gradient that a graph's backward pass leaves: for the leaf with the id ``leaf``, or, where that is 0, for a result of
    the forward pass ``maker`` (``None``: not known whose)."""

    nbytes: int
    leaf: int
    maker: ForwardPass | None


@dataclass(slots=True, eq=False)
class ForwardPass:
    """A forward pass of the current step. ``between_bytes`` were held by no graph when it began, and
    ``backward_between_bytes`` when its backward pass did, as far as that is known."""

    graph: Replannable
    entry: Entry
    call: weakref.ref[ModelCall]
    between_bytes: int
    gradients: tuple[LeftGradient, ...]
    backward_between_bytes: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether it still holds what its backward pass needs."""
        found = self.call()
        return found is not None and found.generator is not None

    @property
    def between(self) -> tuple[int, int]:
        """Bytes held by no graph in its forward and in its backward pass; before that is over, as in the forward pass."""
        backward = self.backward_between_bytes
        return self.between_bytes, self.between_bytes if backward is None else backward


def left_gradient_bytes(ran: Sequence[ForwardPass], sums: bool = True) -> list[int]:
    """For each of ``ran``, bytes of the gradients that those after it have left when its backward pass begins; with ``sums``,
    also of the sum where it adds to one."""
    places = {one: place for place, one in enumerate(ran)}
    left, staying, leaves = [0] * len(ran), 0, set()
    waiting = [0] * len(ran)  # for what this one returned
    for place in reversed(range(len(ran))):
        left[place] = staying + sum(waiting[:place])
        if sums:
            added_to = (gradient.nbytes for gradient in ran[place].gradients if gradient.leaf in leaves)
            left[place] += max(added_to, default=0)
        for gradient in ran[place].gradients:
            taker = -1 if gradient.maker is None else places.get(gradient.maker, -1)
            if taker >= 0:
                waiting[taker] += gradient.nbytes
            elif gradient.leaf not in leaves:
                staying += gradient.nbytes
                leaves.update({gradient.leaf} - {0})
    return left

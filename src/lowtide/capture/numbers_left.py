"""Numbers of tensors (``read_numbers``) that rehearsed calls leave in a model's attributes: what the next one finds there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from lowtide.capture.python_state.effects import attribute_effects
from lowtide.capture.python_state.effects.snapshots import Snapshot
from lowtide.capture.python_state.guards.compared import Comparisons, LateStandIn
from lowtide.capture.python_state.paths import AttributePath, texts, value_at
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.keys import layout_of
from lowtide.program.scalars import NUMBERS

_SOME = {True: torch.tensor(0.75, dtype=torch.float64), False: torch.tensor(3)}  # whether it is a float


class NumbersLeft:
    """Of calls in a row of one model. In an attribute of its own a number is a condition of a program that reads it, so the
    next call may; in a container no plan knows it, so whoever does anything with it is noticed."""

    def __init__(self) -> None:
        self._in_containers = LateStandIn(0.0, Comparisons(float), ())

    def put(self, model: nn.Module, places: Iterable[AttributePath], before: Snapshot) -> None:
        """A call has left tensors and numbers of such at these: the next one finds numbers, as they were ``before`` where there
        were any."""
        for place in places:
            tensors, left = structure.flatten(value_at(model, place))
            derived = structure.derived(left)
            if derived == [left]:
                then, tensor = before.attributes.get(place), tensors[derived[0].tensor.index]
                number = then if type(then) in NUMBERS else derived[0].function(_SOME[tensor.is_floating_point()])
                attribute_effects.write(model, [(place, ("set", number))])
            elif derived:
                left = structure.replaced(left, lambda leaf: leaf, lambda _: self._in_containers)
                attribute_effects.write(model, [(place, ("refill", structure.unflatten(left, tensors)))])

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Raises ``CaptureError`` where the call inside does more with a number in a container than to leave it there."""
        try:
            yield
        finally:
            if self._in_containers.comparisons.used_otherwise:
                refuse_read(())


def refuse_read(places: Sequence[AttributePath]) -> NoReturn:
    """Raises ``CaptureError`` for containers with numbers of tensors in them that a call may read."""
    where = f" ({texts(places)})" if places else ""
    raise CaptureError(
        f"the forward pass reads numbers that an earlier call took of tensors and left in a container{where}, where no plan "
        "knows them. Keep each in an attribute of its own, or as a tensor."
    )


def holds(value: Any) -> bool:
    """Whether a container has numbers of tensors in it."""
    left = structure.flatten(value)[1]
    return not isinstance(left, structure.Derived) and bool(structure.derived(left))


def flat(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Taken apart: numbers of tensors as the tensors themselves, and those that an earlier call has left as zeros."""
    tensors, found = structure.flatten(value)
    plain = structure.replaced(
        found, lambda leaf: 0.0 if type(leaf) is LateStandIn else leaf, lambda derived: derived.tensor
    )
    return tensors, plain


def layout(value: Any) -> Any:
    """Equal for what differs only in the values of tensors, and in numbers of such."""
    return layout_of(*flat(value))

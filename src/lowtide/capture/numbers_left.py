"""Numbers of tensors (``read_numbers``) that rehearsed calls leave in a model's attributes, where the next call finds
them."""

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

_SOME = {True: torch.tensor(0.75, dtype=torch.float64), False: torch.tensor(3)}  # by whether the number is a float


class NumbersLeft:
    """The numbers that consecutive calls of one model leave. A number in its own attribute is a condition of programs
    that read it, so the next call may read it. A number in a container is unknown to plans, so any use of it is
    noticed."""

    def __init__(self) -> None:
        self._in_containers = LateStandIn(0.0, Comparisons(float), ())

    def put(self, model: nn.Module, places: Iterable[AttributePath], before: Snapshot) -> None:
        """After a call has left tensors and their numbers at ``places``, put numbers there for the next call: those
        ``before`` the call, if there were any."""
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
        """A context that raises ``CaptureError`` if the call inside does anything with a number in a container."""
        try:
            yield
        finally:
            if self._in_containers.comparisons.used_otherwise:
                refuse_read(())


def refuse_read(places: Sequence[AttributePath]) -> NoReturn:
    """Raise ``CaptureError`` for containers that hold numbers of tensors and that a call may read."""
    where = f" ({texts(places)})" if places else ""
    raise CaptureError(
        f"the forward pass reads numbers that an earlier call took of tensors and left in a container{where}, where no plan "
        "knows them. Keep each in an attribute of its own, or as a tensor."
    )


def holds(value: Any) -> bool:
    """Whether a container holds numbers of tensors."""
    left = structure.flatten(value)[1]
    return not isinstance(left, structure.Derived) and bool(structure.derived(left))


def flat(value: Any) -> tuple[list[torch.Tensor], Any]:
    """A value taken apart. Numbers of tensors become these tensors; numbers that an earlier call has left become
    zeros."""
    tensors, found = structure.flatten(value)
    plain = structure.replaced(
        found, lambda leaf: 0.0 if type(leaf) is LateStandIn else leaf, lambda derived: derived.tensor
    )
    return tensors, plain


def layout(value: Any) -> Any:
    """A key that is equal for values that differ only in the values of tensors and of numbers of tensors."""
    return layout_of(*flat(value))

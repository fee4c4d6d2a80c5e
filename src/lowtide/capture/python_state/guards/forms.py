"""Guard conditions on attributes that a pass writes, whose values differ in every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.capture.python_state.guards.compared import Comparisons
from lowtide.capture.python_state.guards.reads import Read
from lowtide.capture.python_state.paths import AttributePath, locate, texts, value_at
from lowtide.objects.keys import layout
from lowtide.objects.walk import MUTABLE


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Requires that an attribute holds the same as before except for the values of tensors, whose layouts must match."""

    layout: Any

    @classmethod
    def of(cls, value: Any) -> Form:
        return cls(layout(value))

    def hold(self, value: Any) -> bool:
        """Whether ``value`` has the same layout."""
        return bool(layout(value) == self.layout)


@dataclass(frozen=True, slots=True, eq=False)
class OneContainer:
    """Requires that an attribute is the same container as another: what a pass puts into one is in the other too."""

    model: nn.Module
    other: AttributePath

    def hold(self, value: Any) -> bool:
        """Whether the value is that container."""
        return value is value_at(self.model, self.other)


CONDITIONS = (Comparisons, Form, OneContainer)


def of_one_container(model: nn.Module, places: Sequence[AttributePath]) -> Iterator[Read]:
    """Yield conditions that attributes sharing a container continue to share it."""
    first: dict[int, AttributePath] = {}
    for place in dict.fromkeys(places):
        value, located = value_at(model, place), locate(model, place)
        if located is None or not isinstance(value, MUTABLE):
            continue
        other = first.setdefault(id(value), place)
        if other != place:
            kind = "attribute" if isinstance(located[0], nn.Module) else "held"
            yield Read(kind, *located, OneContainer(model, other), texts([place]))

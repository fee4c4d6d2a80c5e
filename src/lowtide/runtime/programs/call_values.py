"""Plain values among the arguments of calls that are other ones in every call: the weight of a term, a temperature, the number
of a step, the name of a file, at the top or in containers and objects.

A value belongs to the signature of a call until it is seen to change. From then on something stands in its place that every
call has in common: what a number decides are conditions on it, what is computed with it is computed anew
(``capture.python_state.guards.compared``), and of a text nothing is known but that nobody looks at it. Where the program does
more with a value than this, it belongs to the signature again. Items of one list are one value in this, as are those of one
name in the items of a list.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from lowtide.capture import Captured
from lowtide.objects import ways
from lowtide.objects.structure import Changing, Way
from lowtide.program.scalars import NUMBERS
from lowtide.runtime.programs.entry import Sample

_LONG = 256  # characters, of which a digest is kept


class CallValues:
    """Of one model. ``values``: what those that change are in the call that begins, by their ways among its arguments."""

    def __init__(self, model: nn.Module) -> None:
        # Integers among the arguments of Dynamo's graphs are sizes.
        self._kinds = frozenset((float,) if isinstance(model, fx.GraphModule) else (*NUMBERS, str, bytes))
        self.values: dict[Way, Any] = {}
        self._first: dict[
            Way, tuple[type, Any, Way]
        ] = {}  # what there was first, and what that has in common with others
        self._changing: set[Way] = set()
        self._fixed: set[Way] = set()

    def standing(self, arguments: Any) -> dict[Way, Changing]:
        """What stands for those of a call with this structure of arguments that are other ones in other calls."""
        found = [one for one in ways.values_in(arguments) if type(one[1]) in self._kinds]
        if not found:
            return {}
        for way, value in found:
            kind, first, group = self._first.get(way) or self._first.setdefault(way, _told(way, value))
            if kind is type(value) and first != value and first != _told(way, value)[1]:
                self._changing.add(group)
        changing = self._changing - self._fixed
        return (
            {way: self._stand_in(way, value) for way, value in found if self._changes(way, value)} if changing else {}
        )

    def _changes(self, way: Way, value: Any) -> bool:
        kind, _, group = self._first[way]
        return group in self._changing and group not in self._fixed and kind is type(value)

    def _stand_in(self, way: Way, value: Any) -> Changing:
        self.values[way] = value
        return Changing(self.values, way, type(value))

    def settle(self, sample: Sample, captured: Captured) -> None:
        """Have those belong to signatures again with which the program of this call does more than what is known."""
        known = {name for kind, owner, name in captured.contract.conditions.compared() if owner == id(self.values)}
        for way in sample.changing.keys() - known:
            self._fixed.add(ways.alike(way))
            self.values.pop(way, None)


def _told(way: Way, value: Any) -> tuple[type, Any, Way]:
    """What tells a value from others, and what its way has in common with those to others."""
    long = isinstance(value, (str, bytes)) and len(value) > _LONG
    return type(value), (hash(value),) if long else value, ways.alike(way)

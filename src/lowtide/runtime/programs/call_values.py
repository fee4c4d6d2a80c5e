"""Plain values among the arguments of calls that are other ones in every call: the weight of a term, a temperature, the number
of a step, the name of a file, at the top or in containers and objects.

A value belongs to the signature of a call until it is seen to change. From then on something stands in its place that every
call has in common: what a number decides are conditions on it, what is computed with it is computed anew
(``capture.python_state.guards.compared``), and of a text nothing is known but that nobody looks at it. Where the program does
more with a value than this, it belongs to the signature again. Items of one list are one value in this, as are those of one
name in the items of a list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx, nn

from lowtide.capture import Captured
from lowtide.objects import ways
from lowtide.objects.structure import Changing, Way
from lowtide.program.scalars import CHANGING
from lowtide.runtime.programs.entry import Sample

_LONG = 256  # characters, of which a digest is kept


class CallValues:
    """Of one model. ``values``: what those that change are in the call that begins, by their ways among its arguments."""

    def __init__(self, model: nn.Module) -> None:
        # Integers among the arguments of Dynamo's graphs are sizes.
        self._kinds = frozenset((float,) if isinstance(model, fx.GraphModule) else (*CHANGING, str, bytes))
        self.values: dict[Way, Any] = {}
        self._first: dict[Way, _First] = {}
        self._changing: set[Way] = set()  # what ways have in common to those that change
        self._fixed: set[Way] = set()  # and to those among these that belong to signatures again

    def standing(self, arguments: Any) -> dict[Way, Changing]:
        """What stands for those of a call with this structure of arguments that are other ones in other calls."""
        found = [one for one in ways.values_in(arguments) if type(one[1]) in self._kinds]
        for way, value in found:
            first = self._first.get(way) or self._first.setdefault(way, _First.of(way, value))
            if first.group not in self._changing and first.is_of_kind(value) and first.told != _told(value):
                self._changing.add(first.group)
        standing = (one for one in found if self._changes(*one)) if self._changing else ()
        return {way: self._stand_in(way, value) for way, value in standing}

    def _changes(self, way: Way, value: Any) -> bool:
        first = self._first[way]
        return first.group in self._changing and first.group not in self._fixed and first.is_of_kind(value)

    def _stand_in(self, way: Way, value: Any) -> Changing:
        self.values[way] = value
        return Changing(self.values, way, type(value))

    def settle(self, sample: Sample, captured: Captured) -> None:
        """Have those belong to signatures again with which the program of this call does more than what is known."""
        known = {name for kind, owner, name in captured.contract.conditions.compared() if owner == id(self.values)}
        self._fixed.update(map(ways.alike, sample.changing.keys() - known))


class _First(NamedTuple):
    """What there was first: of which ``kind``, what told it from others, and what its way has in common with other ways."""

    kind: type
    told: Any
    group: Way

    @staticmethod
    def of(way: Way, value: Any) -> _First:
        return _First(type(value), _told(value), ways.alike(way))

    def is_of_kind(self, value: Any) -> bool:
        return type(value) is self.kind


def _told(value: Any) -> Any:
    """What tells a value from others of its kind."""
    return hash(value) if isinstance(value, (str, bytes)) and len(value) > _LONG else value

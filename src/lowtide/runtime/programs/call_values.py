"""Plain values among the arguments that differ in every call: the weight of a term, a temperature, the number of a
step, the name of a file; as arguments, or inside containers and objects.

A value belongs to the signature of a call until it changes. From then on, a stand-in takes its place that all calls
share. What a number decides becomes a condition, and what is computed with it is computed anew
(``capture.python_state.guards.compared``). A text may not be looked at. If a program does more with a value, the value
belongs to the signature again. The items of one list count as one value here, as do values under one name in the items
of a list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx, nn

from lowtide.capture import Captured
from lowtide.objects import ways
from lowtide.objects.structure import Changing, Way
from lowtide.program.scalars import CHANGING
from lowtide.runtime.programs.entry import Sample

_LONG = 256  # characters, from which on only a hash is kept


class CallValues:
    """The changing values of one model's calls. ``values``: their values in the current call, by their way among the
    arguments."""

    def __init__(self, model: nn.Module) -> None:
        # Integer arguments of Dynamo's graphs are sizes.
        self._kinds = frozenset((float,) if isinstance(model, fx.GraphModule) else (*CHANGING, str, bytes))
        self.values: dict[Way, Any] = {}
        self._first: dict[Way, _First] = {}
        self._changing: set[Way] = set()  # groups of ways whose values change
        self._fixed: set[Way] = set()  # those of them that belong to the signature again

    def standing(self, arguments: Any) -> dict[Way, Changing]:
        """Stand-ins for the values in this structure of arguments that differ between calls."""
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
        """Return values to the signature if the program of this call does more with them than stand-ins allow."""
        known = {name for kind, owner, name in captured.contract.conditions.compared() if owner == id(self.values)}
        self._fixed.update(map(ways.alike, sample.changing.keys() - known))


class _First(NamedTuple):
    """The first value seen: its ``kind``, a key of its content (``told``), and the group of ways that count as one
    value."""

    kind: type
    told: Any
    group: Way

    @staticmethod
    def of(way: Way, value: Any) -> _First:
        return _First(type(value), _told(value), ways.alike(way))

    def is_of_kind(self, value: Any) -> bool:
        return type(value) is self.kind


def _told(value: Any) -> Any:
    """A key that tells values of one kind apart."""
    return hash(value) if isinstance(value, (str, bytes)) and len(value) > _LONG else value

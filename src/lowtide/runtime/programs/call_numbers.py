"""Numbers among the arguments of calls (the weight of a term, a temperature).

A number belongs to the signature of a call until it is seen to change. From then on something stands in its place that every
call has in common, and what the number decides are conditions on it (``capture.python_state.guards.compared``). Where the
program does more with it than these can say, it belongs to the signature again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from lowtide.capture import Captured
from lowtide.objects.structure import Changing
from lowtide.program.scalars import NUMBERS
from lowtide.runtime.programs.entry import Sample


class CallNumbers:
    """Of one model. ``values``: what those that change are in the call that begins, by their places among its arguments."""

    def __init__(self, model: nn.Module) -> None:
        # Integers among the arguments of Dynamo's graphs are sizes.
        self._kinds = (float,) if isinstance(model, fx.GraphModule) else NUMBERS
        self.values: dict[str, Any] = {}
        self._first: dict[str, Any] = {}
        self._fixed: set[str] = set()

    def standing(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
        """The call with ``Changing`` in the place of numbers that are other ones in other calls."""
        if not any(type(one) in self._kinds for one in (*args, *kwargs.values())):
            return Sample(args, kwargs)
        given = tuple(self._standing(str(place), one) for place, one in enumerate(args))
        return Sample(given, {name: self._standing(name, one) for name, one in kwargs.items()})

    def _standing(self, name: str, value: Any) -> Any:
        if type(value) not in self._kinds or name in self._fixed:
            return value
        first = self._first.setdefault(name, value)
        if type(first) is not type(value) or (first == value and name not in self.values):
            return value
        self.values[name] = value
        return Changing(self.values, name)

    def settle(self, sample: Sample, captured: Captured) -> None:
        """Have those belong to signatures again with which the program of this call does more than what is known."""
        known = {name for kind, owner, name in captured.contract.conditions.compared() if owner == id(self.values)}
        standing = [one for one in (*sample.args, *sample.kwargs.values()) if isinstance(one, Changing)]
        for one in standing:
            if one.name not in known:
                self._fixed.add(one.name)
                self.values.pop(one.name, None)

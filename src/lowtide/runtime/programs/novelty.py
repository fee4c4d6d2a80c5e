"""Whether the programs of a model come again, and what it takes that they do not."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from lowtide.runtime.programs.entry import Entry

_LATEST, _NEW = 32, 27  # calls, and how many of them are captured where that is so in most
_IN_A_ROW = 16  # the same where programs depend on values (lengths, say, or what is drawn), of which none come again
_WORTH = 3  # times as long as its operators take, a capture may take


class _Call(NamedTuple):
    seconds: float  # of capture and planning; 0 where the program was known
    operators: float  # seconds
    by_values: bool


class Novelty:
    """Of the latest calls of a model by plans."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_LATEST)

    def came(self, entry: Entry, seconds: float = 0.0) -> None:
        """A call is about to run by ``entry``, which took so long to capture and to plan, if it was not known."""
        conditions = entry.conditions[0]
        by_values = bool(conditions.questions) or conditions.draws is not None
        self._calls.append(_Call(seconds, entry.plan.time_ns / 1e9, by_values))

    @property
    def seconds(self) -> float:
        """Of a call, in the mean of the latest."""
        calls = self._latest(_IN_A_ROW)
        return sum(call.seconds + call.operators for call in calls) / max(len(calls), 1)

    @property
    def why(self) -> str:
        """In words, that programs come too seldom again to be captured; empty where they do."""
        few, many = self._latest(_IN_A_ROW), self._latest(_LATEST)
        never = len(few) == _IN_A_ROW and all(call.seconds and call.by_values for call in few)
        seldom = len(many) == _LATEST and sum(call.seconds > 0 for call in many) >= _NEW
        calls = few if never else many
        taken, operators = sum(call.seconds for call in calls), sum(call.operators for call in calls)
        if not (never or seldom) or taken <= _WORTH * operators:
            return ""
        new = sum(call.seconds > 0 for call in calls)
        return f"{new} of the last {len(calls)} calls were captured, which took {taken:.1f} s beside {operators:.1f} s"

    def _latest(self, number: int) -> list[_Call]:
        return [*self._calls][-number:]

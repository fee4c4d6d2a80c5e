"""Calls in which a check of values goes otherwise than in any program that is known, where what they do is no graph: codes of a
quantizer that nobody uses are replaced, say. They run apart, and leave the others their program."""

from __future__ import annotations

from collections import Counter

from lowtide.runtime.programs.entry import Signature

_MANY = 16  # calls apart: more than half of all may then be no more
_MOST_NOTED = 256  # ways in which calls go


class UnusualCallError(Exception):
    """This call of a part runs as if it were none."""


class UnusualCalls:
    """Those of one module."""

    def __init__(self) -> None:
        self._why: dict[tuple[Signature, tuple[bool, ...]], str] = {}
        self._calls: Counter[Signature] = Counter()

    def why(self, key: Signature, expected: tuple[bool, ...]) -> str:
        """Why there is no program for calls with this signature whose first checks go like this; empty where that is not
        known."""
        return self._why.get((key, expected), "")

    def note(self, key: Signature, expected: tuple[bool, ...], why: str) -> None:
        if len(self._why) >= _MOST_NOTED:
            self._why.clear()
            self._calls.clear()
        self._why[key, expected] = why

    def are_usual(self, key: Signature, calls: int) -> bool:
        """There is another of them, among so many ``calls`` with this signature: whether they are most of these by now."""
        self._calls[key] += 1
        return self._calls[key] >= _MANY and 2 * self._calls[key] > calls

"""Tracks transfers and collectives in flight in generated code, and where to wait for them (``lowtide.ir.transfers``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class _Begun(NamedTuple):
    end: Callable[[], None]  # writes the lines that wait for it
    made: frozenset[int]
    read: frozenset[int]


class UnderWay:
    """Transfers and collectives begun and not yet waited for, in order."""

    def __init__(self) -> None:
        self._begun: list[_Begun] = []

    def begin(self, end: Callable[[], None], *, made: Iterable[int] = (), read: Iterable[int] = ()) -> None:
        """Add an operation that makes and reads these storages until the lines that ``end`` writes have run."""
        self._begun.append(_Begun(end, frozenset(made), frozenset(read)))

    def settle(self, read: Iterable[int], written: Iterable[int] = ()) -> None:
        """Wait for operations that make storages about to be ``read``, and for those that make or read storages about to be
        ``written`` or released."""
        written = frozenset(written)
        needed = written.union(read)
        self._end([one for one in self._begun if not (one.made.isdisjoint(needed) and one.read.isdisjoint(written))])

    def settle_all(self) -> None:
        self._end(list(self._begun))

    def _end(self, chosen: list[_Begun]) -> None:
        for one in chosen:
            self._begun.remove(one)
            one.end()

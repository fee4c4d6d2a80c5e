"""The pool of a running program's storages: which are resident or evicted, and which to evict next.

The clock is logical: it advances by the cost of every operator, so staleness does not depend on the machine. A choice
takes time linear in the number n of resident storages, or with ``sample`` in its square root, over a random sample of
that size. ``skip_small`` ignores storages below 1 % of the mean size. Both are optimizations of the paper's prototype;
if they leave nothing to evict, all storages are considered. Forgotten entries leave no trace, so a pool can serve an
endless program.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

from lowtide.eviction.entry import Entry
from lowtide.eviction.heuristics import Neighbourhood, heuristic_named

_SMALL = 0.01

Allowed = Callable[[Entry], bool]


class Pool:
    """Resident entries, their ``bytes``, and the logical clock. Raises ``LowtideError`` for an unknown heuristic."""

    def __init__(
        self, *, heuristic: str = "dtr-eq", sample: bool = False, skip_small: bool = False, seed: int = 0
    ) -> None:
        self.clock_ns = 0
        self.bytes = 0
        self.sample = sample
        self.skip_small = skip_small
        self._score, self._make_neighbourhood = heuristic_named(heuristic)
        self._neighbourhood = self._make_neighbourhood()
        self._has_neighbourhood = type(self._neighbourhood) is not Neighbourhood
        self._draw = random.Random(seed)
        self._there: list[Entry] = []  # resident entries with memory, unordered
        self._arrivals = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._there)

    def tick(self, cost_ns: int, read: Iterable[Entry] = ()) -> None:
        """Advance the clock by an operator's cost, and mark the entries that it read as accessed."""
        self.clock_ns += cost_ns
        for entry in read:
            entry.accessed_ns = self.clock_ns

    def touch(self, entry: Entry) -> None:
        """Mark the entry as accessed now."""
        entry.accessed_ns = self.clock_ns

    def enter(self, entry: Entry) -> None:
        """Add a computed entry, on its first computation or after a rebuild."""
        if entry.evicted:
            self.add(entry)
            return
        for parent in entry.parents:
            parent.children[entry] = None
        self._arrive(entry)

    def add(self, entry: Entry) -> None:
        """Mark the entry as resident after recomputation."""
        if entry.evicted:
            entry.evicted = False
            self._neighbourhood.restore(entry)
        self._arrive(entry)

    def evict(self, entry: Entry) -> None:
        """Mark the entry as evicted."""
        self._leave(entry)
        entry.evicted = True
        self._neighbourhood.evict(entry)

    def charge(self, entry: Entry, cost_ns: int) -> None:
        """Change the entry's recomputation cost."""
        entry.cost_ns = cost_ns
        self._neighbourhood.charge(entry)

    def resize(self, entry: Entry, size: int) -> None:
        """Change the entry's size."""
        resident = entry.resident
        if resident:
            self._leave(entry)
        entry.bytes = size
        if resident:
            self._place(entry)

    def link(self, entry: Entry, parents: Iterable[Entry]) -> None:
        """Add parents that recomputing the entry reads too."""
        fresh = [p for p in dict.fromkeys(parents) if p is not entry and p not in entry.parents]
        entry.parents = (*entry.parents, *fresh)
        for parent in fresh:
            parent.children[entry] = None
        self._neighbourhood.link(entry)

    def cut(self, entry: Entry) -> None:
        """Unlink the entry from its parents: it can never be recomputed."""
        self._neighbourhood.unlink(entry)
        for parent in entry.parents:
            parent.children.pop(entry, None)
        entry.parents = ()

    def forget(self, entry: Entry) -> None:
        """Remove the entry for good, from its parents and from its children, which it can no longer help to recompute."""
        if entry.resident:
            self._leave(entry)
        self.cut(entry)
        for child in entry.children:
            child.parents = tuple(parent for parent in child.parents if parent is not entry)
        entry.children = {}
        if entry.evicted:
            entry.evicted = False
            self._neighbourhood.restore(entry)

    def recover(self, entries: Iterable[Entry]) -> None:
        """Rebuild the pool's state from the entries' flags, after a change was interrupted halfway."""
        self._there, self.bytes, self._neighbourhood = [], 0, self._make_neighbourhood()
        entries = list(entries)
        for entry in entries:
            entry.position, entry.known_ns, entry.component = -1, -1, None
            if entry.resident:
                self._place(entry)
        for entry in entries:
            if entry.evicted:
                self._neighbourhood.evict(entry)

    def neighbourhood_ns(self, entry: Entry) -> int:
        """Return the cost of the entry's evicted neighbourhood, as the heuristic counts it."""
        return self._neighbourhood.cost_ns(entry)

    def evictable_bytes(self) -> int:
        """Total bytes of the resident entries that are neither locked nor pinned."""
        return sum(entry.bytes for entry in self._there if not entry.locks and not entry.pinned)

    def victim(self, allowed: Allowed | None = None) -> Entry | None:
        """The allowed entry with the least score, of equals the earliest to arrive; ``None`` if there is none. Only
        resident entries with memory that are neither pinned nor locked can be chosen."""
        there = self._there
        if not there:
            return None
        least_bytes = _SMALL * self.bytes / len(there) if self.skip_small else 0.0
        if self.sample:
            drawn = self._draw.sample(range(len(there)), math.isqrt(len(there) - 1) + 1)
            found = self._least([there[index] for index in drawn], allowed, least_bytes)
            if found is not None:
                return found
        found = self._least(there, allowed, least_bytes)
        return found if found is not None or not least_bytes else self._least(there, allowed, 0.0)

    def _least(self, entries: Iterable[Entry], allowed: Allowed | None, least_bytes: float) -> Entry | None:
        """The entry with the least score. A neighbourhood only adds to a score, so it is computed only if the score
        without it is low enough."""
        clock_ns, score, neighbourhood_ns, draw = self.clock_ns, self._score, self._neighbourhood.cost_ns, self._draw
        best, least = None, math.inf
        for entry in entries:
            if entry.locks or entry.pinned or entry.bytes < least_bytes or (allowed and not allowed(entry)):
                continue
            stale_ns = clock_ns - entry.accessed_ns
            value = score(entry, 0, stale_ns, draw)
            if self._has_neighbourhood and value <= least:
                value = score(entry, neighbourhood_ns(entry), stale_ns, draw)
            if best is None or value < least or (value == least and entry.arrived < best.arrived):
                best, least = entry, value
        return best

    def _arrive(self, entry: Entry) -> None:
        self._arrivals += 1
        entry.arrived = self._arrivals
        entry.accessed_ns = self.clock_ns
        self._place(entry)

    def _place(self, entry: Entry) -> None:
        entry.resident = True
        self.bytes += entry.bytes
        if entry.bytes:
            entry.position = len(self._there)
            self._there.append(entry)

    def _leave(self, entry: Entry) -> None:
        entry.resident = False
        self.bytes -= entry.bytes
        if entry.position >= 0:
            last = self._there.pop()
            if last is not entry:
                self._there[entry.position] = last
                last.position = entry.position
            entry.position = -1

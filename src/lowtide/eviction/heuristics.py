"""The heuristics: the storage with the least score is evicted. Kirisame et al., section 2 and appendices.

    dtr         (own cost + evicted neighbourhood) / (bytes x staleness)
    dtr-eq      the same with connected components in place of the exact neighbourhood
    e-star      own cost + evicted neighbourhood             (that of theorem 3.1)
    dtr-local   own cost / (bytes x staleness)
    msps        (own cost + evicted ancestors) / bytes      (Peng et al., Capuchin, ASPLOS 2020: memory saved per second)
    lru         1 / staleness
    size        1 / bytes                                    (largest first)
    random      a number at random

Costs and staleness (time since the last access) in nanoseconds.

The *neighbourhood* of a storage: the evicted storages around it, whose cost is added to its own recomputation's.

``Exact`` is the evicted neighbourhood e* of the paper (section 2): evicted ancestors reached through evicted ones, which
must be rebuilt first, and evicted descendants reached likewise, whose rebuild needs this storage again.
``Connected`` is its relaxation: undirected connected components of evicted storages, in a union-find structure with the
cost of each component. Components are never split: a rebuilt storage only subtracts its own cost.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from lowtide.errors import LowtideError
from lowtide.eviction.entry import Component, Entry

_Edges = Callable[[Entry], Iterable[Entry]]
_up: _Edges = operator.attrgetter("parents")
_down: _Edges = operator.attrgetter("children")


class Neighbourhood:
    """No neighbourhood; the base class. The pool calls the methods just after an eviction or its end, just before edges
    are removed, and just after edges or a cost were added."""

    def evict(self, entry: Entry) -> None:
        pass

    restore = charge = link = unlink = evict

    def cost_ns(self, entry: Entry) -> int:
        return 0


class Exact(Neighbourhood):
    """The neighbourhood e*, or only its ancestors. Costs are cached until something within a storage's reach
    changes."""

    def __init__(self, *, descendants: bool = True) -> None:
        self.descendants = descendants

    def _forget(self, entry: Entry) -> None:
        """Drop the cached costs of all entries that have this one in their neighbourhood."""
        entry.known_ns = -1
        for edges in (_up, _down):
            for here in (entry, *_reached(entry, edges)):
                for neighbour in edges(here):
                    neighbour.known_ns = -1

    evict = restore = link = unlink = _forget

    def charge(self, entry: Entry) -> None:
        if entry.evicted:
            self._forget(entry)

    def cost_ns(self, entry: Entry) -> int:
        if entry.known_ns < 0:
            found = _reached(entry, _up)
            if self.descendants:
                found |= _reached(entry, _down)
            entry.known_ns = sum(there.cost_ns for there in found)
        return entry.known_ns


class Connected(Neighbourhood):
    """Connected components of evicted storages. On its rebuild, an entry subtracts the cost that it added."""

    def evict(self, entry: Entry) -> None:
        entry.charged_ns = entry.cost_ns
        component = entry.component = Component(entry.cost_ns)
        for neighbour in _evicted_beside(entry):
            component.join(neighbour)

    def restore(self, entry: Entry) -> None:
        if entry.component is not None:
            entry.component.find().total_ns -= entry.charged_ns
            entry.component = None

    def charge(self, entry: Entry) -> None:
        if entry.component is not None:
            entry.component.find().total_ns += entry.cost_ns - entry.charged_ns
            entry.charged_ns = entry.cost_ns

    def link(self, entry: Entry) -> None:
        if entry.component is not None:
            for neighbour in _evicted_beside(entry):
                entry.component.join(neighbour)

    def cost_ns(self, entry: Entry) -> int:
        leaders: list[Component] = []  # few, so a list is faster than a set
        total_ns = 0
        for component in _evicted_beside(entry):
            leader = component if component.leader is None else component.find()
            if leader not in leaders:
                leaders.append(leader)
                total_ns += leader.total_ns
        return total_ns


def _evicted_beside(entry: Entry) -> Iterator[Component]:
    for edges in (entry.parents, entry.children):
        for neighbour in edges:
            if neighbour.component is not None and neighbour is not entry:
                yield neighbour.component


def _reached(entry: Entry, edges: _Edges) -> set[Entry]:
    """Evicted entries reached along the edges through evicted ones, without the entry itself."""
    seen: set[Entry] = set()
    waiting = [entry]
    while waiting:
        for neighbour in edges(waiting.pop()):
            if neighbour.evicted and neighbour not in seen and neighbour is not entry:
                seen.add(neighbour)
                waiting.append(neighbour)
    return seen


Score = Callable[[Entry, int, int, random.Random], float]  # of entry, neighbourhood cost, staleness


def _rate(entry: Entry, neighbourhood_ns: int, stale_ns: int, draw: random.Random) -> float:
    return (entry.cost_ns + neighbourhood_ns) / (entry.bytes * (stale_ns + 1))


# The score of each heuristic, and the kind of neighbourhood that it uses.
HEURISTICS: dict[str, tuple[Score, Callable[[], Neighbourhood]]] = {
    "dtr-eq": (_rate, Connected),
    "dtr": (_rate, Exact),
    "e-star": (lambda entry, neighbourhood_ns, _stale_ns, _draw: entry.cost_ns + neighbourhood_ns, Exact),
    "dtr-local": (_rate, Neighbourhood),
    "lru": (lambda _entry, _neighbourhood_ns, stale_ns, _draw: 1.0 / (stale_ns + 1), Neighbourhood),
    "size": (lambda entry, _neighbourhood_ns, _stale_ns, _draw: 1.0 / entry.bytes, Neighbourhood),
    "msps": (
        lambda entry, neighbourhood_ns, _stale_ns, _draw: (entry.cost_ns + neighbourhood_ns) / entry.bytes,
        partial(Exact, descendants=False),
    ),
    "random": (lambda _entry, _neighbourhood_ns, _stale_ns, draw: draw.random(), Neighbourhood),
}


def heuristic_named(name: str) -> tuple[Score, Callable[[], Neighbourhood]]:
    """The score and neighbourhood of a heuristic. Raises ``LowtideError``, with the known names, for an unknown one."""
    if name not in HEURISTICS:
        raise LowtideError(f"no heuristic is named {name!r}; known: {', '.join(HEURISTICS)}")
    return HEURISTICS[name]

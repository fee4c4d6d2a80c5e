"""What evicting a storage may cost beyond its own computation: the evicted storages around it.

``Exact`` is the evicted neighbourhood e* of the paper (section 3): evicted ancestors reached through evicted ones, which
would have to be rebuilt first, and evicted descendants reached likewise, whose rebuilding would need this one again.
``Connected`` is its relaxation: evicted storages in undirected connected components, kept in a union-find structure with
the cost of each component; nothing is ever split, so a rebuilt storage only takes its own cost away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Graph(Protocol):
    """What a neighbourhood looks at. ``parents[s]``: what is read to compute s; ``children`` is the inverse."""

    @property
    def parents(self) -> Sequence[Sequence[int]]: ...

    @property
    def children(self) -> Sequence[Sequence[int]]: ...

    @property
    def cost_ns(self) -> Sequence[int]: ...

    @property
    def evicted(self) -> Sequence[bool]: ...


class Neighbourhood(Protocol):
    """Told of every eviction and of every end of one."""

    def evict(self, storage: int) -> None: ...

    def restore(self, storage: int) -> None: ...

    def cost_ns(self, storage: int) -> int: ...


class Alone:
    """No neighbourhood."""

    def evict(self, storage: int) -> None:
        pass

    def restore(self, storage: int) -> None:
        pass

    def cost_ns(self, storage: int) -> int:
        return 0


class Exact:
    """e*, or its ancestors alone. Costs are remembered until an eviction or its end reaches the storage."""

    def __init__(self, graph: Graph, *, descendants: bool = True) -> None:
        self.graph = graph
        self.descendants = descendants
        self.known: dict[int, int] = {}

    def evict(self, storage: int) -> None:
        self._forget(storage)

    def restore(self, storage: int) -> None:
        self._forget(storage)

    def cost_ns(self, storage: int) -> int:
        if storage not in self.known:
            graph = self.graph
            around = set(_evicted_from(storage, graph.parents, graph.evicted))
            if self.descendants:
                around.update(_evicted_from(storage, graph.children, graph.evicted))
            self.known[storage] = sum(graph.cost_ns[s] for s in around)
        return self.known[storage]

    def _forget(self, storage: int) -> None:
        """Whoever has the storage in its neighbourhood, from either side."""
        self.known.pop(storage, None)
        for edges in (self.graph.parents, self.graph.children):
            for here in (storage, *_evicted_from(storage, edges, self.graph.evicted)):
                for neighbour in edges[here]:
                    self.known.pop(neighbour, None)


class Connected:
    """Components of evicted storages with union by size and path halving (Tarjan 1975)."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leader: dict[int, int] = {}  # of evicted storages, and of whatever led them once
        self.total_ns: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.slot: dict[int, int] = {}  # storage -> its element; a restored storage leaves its element behind
        self.elements = 0

    def evict(self, storage: int) -> None:
        element = self.slot[storage] = self.elements
        self.elements += 1
        self.leader[element], self.size[element] = element, 1
        self.total_ns[element] = self.graph.cost_ns[storage]
        for neighbour in self._around(storage):
            self._join(element, self.slot[neighbour])

    def restore(self, storage: int) -> None:
        leader = self._find(self.slot.pop(storage))
        self.total_ns[leader] -= self.graph.cost_ns[storage]

    def cost_ns(self, storage: int) -> int:
        leaders = {self._find(self.slot[neighbour]) for neighbour in self._around(storage)}
        return sum(self.total_ns[leader] for leader in leaders)

    def _around(self, storage: int) -> Iterator[int]:
        for edges in (self.graph.parents, self.graph.children):
            for neighbour in edges[storage]:
                if neighbour in self.slot and neighbour != storage:
                    yield neighbour

    def _find(self, element: int) -> int:
        leader = self.leader
        while leader[element] != element:
            leader[element] = leader[leader[element]]
            element = leader[element]
        return element

    def _join(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        if one == other:
            return
        if self.size[one] < self.size[other]:
            one, other = other, one
        self.leader[other] = one
        self.size[one] += self.size[other]
        self.total_ns[one] += self.total_ns.pop(other)


def _evicted_from(storage: int, edges: Sequence[Sequence[int]], evicted: Sequence[bool]) -> Iterator[int]:
    """Evicted storages reached along the edges through evicted ones."""
    seen = {storage}
    waiting = [storage]
    while waiting:
        for neighbour in edges[waiting.pop()]:
            if evicted[neighbour] and neighbour not in seen:
                seen.add(neighbour)
                waiting.append(neighbour)
                yield neighbour

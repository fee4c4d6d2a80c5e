"""A storage as the heuristics see it: its size, its recomputation cost, and what it is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Entry:
    """A storage, compared by identity. Clients may subclass it.

    ``cost_ns``: the time to recompute it by its own operator. ``parents``: the entries that this reads; ``children`` is
    the inverse, kept by the pool in order. An entry is *resident* (in memory), *evicted* (computed, not in memory, can
    be rebuilt) or neither: not computed yet, or gone for good. ``locks`` and ``pinned`` belong to the client; either
    prevents eviction. ``arrived`` numbers arrivals; of entries with equal scores the one with the least number is
    evicted first, so a client may set it.
    """

    bytes: int = 0
    cost_ns: int = 0
    parents: tuple[Entry, ...] = ()
    children: dict[Entry, None] = field(default_factory=dict)
    accessed_ns: int = 0
    arrived: int = 0
    locks: int = 0
    pinned: bool = False
    resident: bool = False
    evicted: bool = False
    position: int = -1  # in the pool's list of residents
    component: Component | None = None  # its component of evicted storages
    charged_ns: int = 0  # cost that the entry added to its component
    known_ns: int = -1  # cost of the exact neighbourhood, -1 if unknown


@dataclass(eq=False, repr=False, slots=True)
class Component:
    """An element of a union-find forest (Tarjan 1975). The leader has the total cost of its component. Elements only
    refer upwards, so one without an entry is freed when no path leads through it."""

    total_ns: int
    leader: Component | None = None
    size: int = 1

    def find(self) -> Component:
        """Return the leader of the component, halving the path to it."""
        here = self
        while (above := here.leader) is not None:
            if above.leader is None:
                return above
            here.leader = above.leader
            here = above.leader
        return here

    def join(self, other: Component) -> None:
        one, two = self.find(), other.find()
        if one is two:
            return
        if one.size < two.size:
            one, two = two, one
        two.leader = one
        one.size += two.size
        one.total_ns += two.total_ns

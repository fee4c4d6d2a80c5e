"""A storage as the heuristics see it: its size, what computing it again costs, and what it is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Entry:
    """Compared by identity, and made to be subclassed by whoever has more to say about a storage.

    ``cost_ns``: computing it again by its own operator. ``parents``: what is read for that; ``children``, kept by the pool,
    is the inverse, in order. *Resident* (there), *evicted* (was computed, is not there, can be rebuilt) or neither: not
    computed yet, or gone for good. ``locks`` and ``pinned`` are the client's: either keeps it from being chosen.
    ``arrived`` numbers arrivals; among entries of equal score the least goes first, so a client may order them otherwise.
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
    component: Component | None = None  # the component of evicted storages that it belongs to
    charged_ns: int = 0  # cost that the entry added to its component
    known_ns: int = -1  # the cost of the exact neighbourhood, where it is known


@dataclass(eq=False, repr=False, slots=True)
class Component:
    """An element of a union-find forest (Tarjan 1975); a leader knows the total of its component. Elements point
    upwards only, so one that no entry stands for any more vanishes as soon as nobody's way leads over it."""

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

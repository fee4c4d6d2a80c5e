"""A storage as the heuristics see it: its size, what computing it again costs, and what it is computed from."""

from __future__ import annotations


class Entry:
    """Compared by identity, and made to be subclassed by whoever has more to say about a storage.

    ``cost_ns``: computing it again by its own operator. ``parents``: what is read for that; ``children``, kept by the pool,
    is the inverse, in order. *Resident* (there), *evicted* (was computed, is not there, can be rebuilt) or neither: not
    computed yet, or gone for good. ``locks`` and ``pinned`` are the client's: either keeps it from being chosen.
    ``arrived`` numbers arrivals; among entries of equal score the least goes first, so a client may order them otherwise.
    """

    __slots__ = (
        "__weakref__",
        "accessed_ns",
        "arrived",
        "bytes",
        "charged_ns",
        "children",
        "component",
        "cost_ns",
        "evicted",
        "known_ns",
        "locks",
        "parents",
        "pinned",
        "position",
        "resident",
    )

    def __init__(self, bytes: int = 0, cost_ns: int = 0, parents: tuple[Entry, ...] = ()) -> None:
        self.bytes = bytes
        self.cost_ns = cost_ns
        self.parents = parents
        self.children: dict[Entry, None] = {}
        self.accessed_ns = 0
        self.arrived = 0
        self.locks = 0
        self.pinned = False
        self.resident = False
        self.evicted = False
        self.position = -1  # in the pool's list of residents
        self.component: Component | None = None  # where evicted storages are joined
        self.charged_ns = 0  # what the entry added to its component
        self.known_ns = -1  # the cost of the exact neighbourhood, where it is known


class Component:
    """An element of a union-find forest (Tarjan 1975); a leader knows the total of its component.

    Elements point upwards only, so one that no entry stands for any more vanishes as soon as nobody's way leads over it.
    """

    __slots__ = ("leader", "size", "total_ns")

    def __init__(self, total_ns: int) -> None:
        self.leader: Component | None = None
        self.size = 1
        self.total_ns = total_ns

    def find(self) -> Component:
        """The leader; the way there is halved."""
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

"""The storages of a live run: which the program holds, which were evicted, and which may be forgotten.

A storage is a node from the moment that it is seen. Its bytes are there (resident), or were evicted and can be computed again
by its record; nodes that nothing needs any more are released, and with them what they were computed from. What can not be
computed again (parameters, inputs, results of operators that run once) has no record, and is never evicted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic import tally
from lowtide.dynamic.node import WRITTEN, Handle, Node, Origin, Record, dependents_of, storage_of
from lowtide.dynamic.storages import empty, is_empty
from lowtide.dynamic.tally import Tally
from lowtide.eviction import Entry, Pool

_PLAIN_DEVICES = ("cpu", "cuda")
_FEW = 32  # operators


def _near(entry: Entry) -> bool:
    """Whether few operators would have to run to have the entry back."""
    gone = {entry}
    waiting = [entry]
    while waiting:
        for parent in waiting.pop().parents:
            if not parent.resident and parent not in gone:
                gone.add(parent)
                waiting.append(parent)
        if len(gone) > _FEW:
            return False
    return True


def _origin(entry: Entry) -> Origin:
    return cast("Node", entry).origin


# What goes first, whatever the scores. What a backward pass computes lies behind ever more of the forward pass the longer it
# waits; gradients, which an optimizer will read, lie behind all of both.
_PREFERENCES: tuple[Callable[[Entry], bool], ...] = (
    lambda entry: _origin(entry) is Origin.FORWARD and _near(entry),
    lambda entry: _origin(entry) is not Origin.GRADIENT and _near(entry),
    lambda entry: _origin(entry) is Origin.FORWARD,
    _near,
    lambda _: True,
)


class Memory:
    """The nodes of a run, and what is locked for the operators under way.

    ``banish``: forget what the program released as soon as nothing evicted needs it. ``ignore``: keep what the program released
    until it is evicted. ``on_release`` is called with every node whose storage the program let go.
    """

    def __init__(self, pool: Pool, *, banish: bool = False, ignore: bool = False) -> None:
        self.pool = pool
        self.banish = banish
        self.ignore = ignore
        self.tally = Tally()
        self.nodes: dict[int, Node] = {}  # by the address of the storage that the program holds
        self.dead: list[Handle] = []  # handles of storages that are gone, not yet looked at
        self.frames: list[tuple[Node, ...]] = []  # what the operators under way need, the innermost last
        self.running = 0  # of the frames, those whose operators were started
        self.rebuilds = 0  # under way, one inside the other
        self.spare: dict[Node, None] = {}  # rebuilt for others though the program released them, the oldest first
        self.held: dict[Node, None] = {}  # without a record, and records read them
        self.refused_bytes: Callable[[], int] = lambda: 0  # by which the last allocation exceeded the limit; asked once
        self.free_bytes: Callable[[], int] = lambda: sys.maxsize  # below the limit
        self.on_release: Callable[[Node], None] = lambda node: None

    # --- what there is ---------------------------------------------------------------------------------------------

    def node_of(self, tensor: Tensor) -> Node:
        """The node of the tensor's storage, a new one where it was not seen before."""
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
            return _opaque()
        node = self.nodes.get(storage._cdata)
        if node is None or node.handle is None or node.handle() is not storage:
            node = self.adopt(storage, opaque=tensor.is_quantized)
        return node

    def adopt(self, storage: UntypedStorage, *, opaque: bool = False) -> Node:
        """A storage from elsewhere: it can not be computed again."""
        node = Node(0)
        node.size_bytes = storage.nbytes()
        node.resident = node.pinned = True
        node.opaque = opaque or storage.device.type not in _PLAIN_DEVICES
        # Memory that is not PyTorch's own, such as a NumPy array's, may be written without anybody noticing.
        node.writers = int(not storage.resizable() and not storage.is_shared())
        self.own(node, storage)
        return node

    def own(self, node: Node, storage: UntypedStorage) -> None:
        """The program holds the node's bytes in this storage."""
        handle = Handle(storage, self.dead.append)
        handle.node = node
        node.handle = handle
        node.address = storage._cdata
        self.nodes[node.address] = node

    def attach(self, node: Node, record: Record) -> None:
        """The node can be computed by the record."""
        if not record.results:
            for parent in node.parents:
                if parent.record is None and (storage := parent.storage()) is not None:
                    record.holds.append(storage)
                    self.held[parent] = None
        record.results[node.place] = node
        node.record = record

    def open(self, needs: Iterable[Node]) -> tuple[Node, ...]:
        """An operator that needs these is under way."""
        frame = tuple(needs)
        for node in frame:
            node.locks += 1
        self.frames.append(frame)
        return frame

    def close(self, frame: tuple[Node, ...]) -> None:
        """The operator of the innermost frame has ended."""
        self.frames.pop()
        for node in frame:
            node.locks -= 1

    # --- evicting --------------------------------------------------------------------------------------------------

    def evict_one(self) -> bool:
        """Empty the storage that the heuristic chooses; false where none can go."""
        began = tally.now_ns()
        node = self._victim()
        if node is None:
            return False
        self.evict(node)
        self.tally.evictions += 1
        self.tally.evicted_bytes += node.size_bytes
        self.tally.evict_ns += tally.now_ns() - began
        return True

    def _victim(self) -> Node | None:
        if self.dead:
            self.bury()
        spare = next((node for node in self.spare if not node.locks), None)
        if spare is not None:
            return spare
        chosen = self._preferred()
        if chosen is None and self.sweep(thorough=True):
            chosen = self._preferred()
        return chosen

    def _preferred(self) -> Node | None:
        chosen = (self.pool.victim(allowed) for allowed in _PREFERENCES)
        return cast("Node | None", next((entry for entry in chosen if entry is not None), None))

    def evict(self, node: Node) -> None:
        """Give the bytes back; what holds the storage keeps it, empty."""
        storage = node.handle() if node.handle is not None else None
        self.pool.evict(node)
        self.spare.pop(node, None)
        node.kept = None
        if storage is not None:
            empty(storage)
        elif node.handle is None:
            self.release(node)

    def room_bytes(self) -> int:
        """What is free, and what could be evicted."""
        return self.free_bytes() + self.pool.evictable_bytes()

    def sweep(self, *, thorough: bool = False) -> bool:
        """Let go of what only records hold, where nothing evicted would have to be computed from it.

        What was computed from it stays from then on. Unless ``thorough``, only where that is no more than what is let go; what
        was written from it does not count, such as the optimizer's state from a gradient, which would go on to hold the
        gradients of all steps. Whether anything went.
        """
        self.bury()
        gone = [node for node in list(self.held) if not node.children or self._let_go(node, thorough=thorough)]
        for node in gone:
            self.held.pop(node, None)
        return bool(gone)

    def _let_go(self, node: Node, *, thorough: bool) -> bool:
        if node.locks or not node.address or torch._C._storage_Use_Count(node.address) > 1:
            return False
        dependents = [dependent for dependent in dependents_of(node) if dependent.alive()]
        if any(d.locks or not d.resident for d in dependents):
            return False
        fresh = sum(d.bytes for d in dependents if d.place != WRITTEN or d not in node.children)
        if not thorough and fresh > node.size_bytes:
            return False
        for dependent in dependents:
            self.keep(dependent)
        return True

    def keep(self, node: Node) -> None:
        """From now on the resident node can not be computed again, so it stays."""
        record, storage, parents = node.record, node.storage(), node.parents
        if record is None:
            return
        node.record = None
        node.pinned = True
        record.results.pop(node.place, None)
        if not record.results:
            record.holds = []
        self.pool.cut(node)
        self.pool.resize(node, 0)
        for child in node.children:
            if child.record is not None and storage is not None:
                child.record.holds.append(storage)
                self.held[node] = None
        for parent in parents:
            self.release(parent)

    # --- the end of things -----------------------------------------------------------------------------------------

    def bury(self) -> None:
        """Take note of the storages that the program released."""
        dead = self.dead
        while dead:
            handle = dead.pop()
            node = handle.node
            if node.handle is not handle:
                continue
            if self.nodes.get(node.address) is node:
                del self.nodes[node.address]
            node.handle = None
            self.on_release(node)
            if node.resident and node.record is not None and node.kept is None:
                self.pool.evict(node)
            self.release(node)

    def release(self, node: Node) -> None:
        """Forget the node, and then what it was computed from, where nothing needs them any more."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node.handle is not None or node.locks:
                continue
            if node.children and not (self.banish and self._banished(node)):
                continue
            if node.record is not None:
                node.record.results.pop(node.place, None)
                if not node.record.results:
                    node.record.holds = []
            node.record = node.kept = None
            self.spare.pop(node, None)
            waiting.extend(node.parents)
            self.pool.forget(node)

    def _banished(self, node: Node) -> bool:
        """Nothing evicted needs the node: whoever was computed from it stays from now on."""
        if self.rebuilds or any(not child.resident for child in node.children):
            return False
        for child in list(node.children):
            self.keep(child)
        return not node.children

    def recover(self) -> None:
        """No operator is under way any more: the last one failed or was interrupted, between any two steps of it."""
        self.frames.clear()
        self.rebuilds = 0
        self.running = 0
        known = self._known()
        for node in known:
            node.locks = 0
            storage = node.storage()
            if node.handle is not None and self.nodes.get(node.address) is not node:
                node.handle = None  # a newer version has the storage
            if node.handle is not None and node.handle() is None:
                self.dead.append(node.handle)
            if node.record is not None and storage is not None and not is_empty(storage):
                if node.evicted:
                    node.kept = None
                    empty(storage)
                else:
                    node.resident = True
        self.pool.recover(known)
        self.bury()
        for node in known:
            self.release(node)

    def _known(self) -> list[Node]:
        """Every node that something can still lead to."""
        there = cast("Iterator[Node]", iter(self.pool))
        waiting = list(dict.fromkeys((*self.nodes.values(), *self.held, *self.spare, *there)))
        seen = set(waiting)
        found = []
        while waiting:
            node = waiting.pop()
            found.append(node)
            around = [other for other in (*node.parents, *node.children) if other not in seen]
            seen.update(around)
            waiting.extend(around)
        return found

    def forget(self) -> None:
        """Forget everything; all that is held must have been restored."""
        for node in self._known():
            node.record = node.kept = node.handle = None
            node.parents, node.children = (), {}
        self.nodes.clear()
        self.held.clear()
        self.spare.clear()
        self.dead.clear()
        self.frames.clear()
        self.rebuilds = 0


def _opaque() -> Node:
    node = Node(0)
    node.resident = node.pinned = node.opaque = True
    return node

"""The storages of a live run: which the program holds, which were evicted, and which may be forgotten.

A storage is a node from the moment that it is seen. Its bytes are there (resident), or were evicted and can be computed again
by its call; nodes that nothing needs any more are released, and with them what they were computed from. What can not be
computed again (parameters, inputs, results of operators that run once) is a constant: it has no call, and is never evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic import statistics
from lowtide.dynamic.limit import Limit
from lowtide.dynamic.node import WRITTEN, Handle, Node, OperatorCall, Origin, dependents_of, storage_of
from lowtide.dynamic.recording import Recorder
from lowtide.dynamic.storages import empty, is_empty
from lowtide.eviction import Entry, Pool

_PLAIN_DEVICES = ("cpu", "cuda")
_FEW = 32  # operators


def _quickly_rebuilt(entry: Entry) -> bool:
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


# What goes first, whatever the scores: what was computed by this part of the program or one before it and, where that is asked
# for, can be rebuilt quickly. What a backward pass computes lies behind ever more of the forward pass the longer it waits;
# gradients, which an optimizer will read, lie behind all of both.
_PREFERENCES = (
    (Origin.FORWARD, True),
    (Origin.BACKWARD, True),
    (Origin.FORWARD, False),
    (Origin.GRADIENT, True),
    (Origin.GRADIENT, False),
)


class Memory:
    """The nodes of a run, what is locked for the operators under way, and the limit that their bytes are kept within.

    Whoever reads or changes it holds ``lock``. ``banish``: forget what the program released as soon as nothing evicted needs
    it. ``ignore``: keep what the program released until it is evicted. ``recorder``: told of every storage that the program
    let go.
    """

    def __init__(
        self, pool: Pool, limit: Limit, *, banish: bool = False, ignore: bool = False, recorder: Recorder | None = None
    ) -> None:
        self.pool = pool
        self.limit = limit
        self.banish = banish
        self.ignore = ignore
        self.recorder = recorder
        self.lock = threading.RLock()
        self.counters = statistics.Counters()
        self.nodes: dict[int, Node] = {}  # by the address of the storage that the program holds
        self.dead: list[Handle] = []  # handles of storages that are gone, not yet looked at
        self.locked: list[tuple[Node, ...]] = []  # what each operator under way needs, the innermost last
        self.started = 0  # of the operators under way, the outermost ones that run already
        self.rebuilds = 0  # under way, one inside the other
        self.intermediates: dict[
            Node, None
        ] = {}  # rebuilt only for others, the program released them; the oldest first
        self.read_constants: dict[Node, None] = {}  # that calls read, and hold the storages of

    # --- what there is ---------------------------------------------------------------------------------------------

    def known(self, storage: UntypedStorage) -> Node | None:
        """The node of a storage that was seen before."""
        node = self.nodes.get(storage._cdata)
        return node if node is not None and node.handle is not None and node.handle() is storage else None

    def node_of(self, tensor: Tensor) -> Node:
        """The node of the tensor's storage, a new one where it was not seen before."""
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
            node = Node.constant()
            node.opaque = True
            return node
        return self.known(storage) or self.add_constant(storage, opaque=tensor.is_quantized)

    def add_constant(self, storage: UntypedStorage, *, opaque: bool = False) -> Node:
        """A storage from elsewhere: it can not be computed again."""
        node = Node.constant(storage.nbytes())
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

    def attach(self, node: Node, call: OperatorCall, storage: UntypedStorage | None, cost_ns: int, place: int) -> None:
        """The node, whose bytes are there in ``storage``, can be computed by the call in this time, as the result there."""
        node.cost_ns = cost_ns
        node.place = place
        if not call.results:
            for parent in node.parents:
                if parent.call is None and (held := parent.storage()) is not None:
                    call.holds.append(held)
                    self.read_constants[parent] = None
        call.results[place] = node
        node.call = call
        if storage is not None and node.handle is None:
            self.own(node, storage)
        self.pool.enter(node)
        if self.ignore:
            node.kept = storage

    def lock_all(self, needs: Iterable[Node]) -> tuple[Node, ...]:
        """An operator that needs these is under way: they stay until ``unlock_last``."""
        nodes = tuple(needs)
        for node in nodes:
            node.locks += 1
        self.locked.append(nodes)
        return nodes

    def unlock_last(self, nodes: tuple[Node, ...]) -> None:
        """The innermost operator under way, which needed ``nodes``, has ended."""
        self.locked.pop()
        for node in nodes:
            node.locks -= 1

    # --- evicting --------------------------------------------------------------------------------------------------

    def make_room(self, wanted_bytes: int) -> bool:
        """Evict until so many bytes can be allocated; false where that cannot be."""
        limit = self.limit
        while limit.free_bytes() < wanted_bytes:
            if not self.evict_one():
                limit.refuse(wanted_bytes)
                return False
        return True

    def evict_one(self) -> bool:
        """Empty the storage that the heuristic chooses; false where none can go."""
        began = statistics.now_ns()
        node = self._victim()
        if node is None:
            return False
        self.evict(node)
        self.counters.evictions += 1
        self.counters.evicted_bytes += node.size_bytes
        self.counters.evict_ns += statistics.now_ns() - began
        return True

    def _victim(self) -> Node | None:
        if self.dead:
            self.release_dead()
        intermediate = next((node for node in self.intermediates if not node.locks), None)
        if intermediate is not None:
            return intermediate
        chosen = self._preferred()
        if chosen is None and self.release_constants(thorough=True):
            chosen = self._preferred()
        return chosen

    def _preferred(self) -> Node | None:
        for latest, quickly in _PREFERENCES:

            def allowed(entry: Entry, latest: Origin = latest, quickly: bool = quickly) -> bool:
                return cast("Node", entry).origin <= latest and (not quickly or _quickly_rebuilt(entry))

            if (chosen := self.pool.victim(allowed)) is not None:
                return cast("Node", chosen)
        return None

    def evict(self, node: Node) -> None:
        """Give the bytes back; what holds the storage keeps it, empty."""
        storage = node.held_storage()
        self.pool.evict(node)
        self.intermediates.pop(node, None)
        node.kept = None
        if storage is not None:
            empty(storage)
        elif node.handle is None:
            self.release(node)

    def available_bytes(self) -> int:
        """What is free, and what could be evicted."""
        return self.limit.free_bytes() + self.pool.evictable_bytes()

    def pin(self, node: Node) -> None:
        """From now on the resident node can not be computed again, so it stays."""
        call, storage, parents = node.call, node.storage(), node.parents
        if call is None:
            return
        node.call = None
        node.pinned = True
        call.forget_result(node)
        self.pool.cut(node)
        self.pool.resize(node, 0)
        for child in node.children:
            if child.call is not None and storage is not None:
                child.call.holds.append(storage)
                self.read_constants[node] = None
        for parent in parents:
            self.release(parent)

    # --- the end of things -----------------------------------------------------------------------------------------

    def release_dead(self) -> None:
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
            if self.recorder is not None:
                self.recorder.release(node)
            if node.resident and node.call is not None and node.kept is None:
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
            if node.call is not None:
                node.call.forget_result(node)
            node.call = node.kept = None
            self.intermediates.pop(node, None)
            waiting.extend(node.parents)
            self.pool.forget(node)

    def _banished(self, node: Node) -> bool:
        """Nothing evicted needs the node: whoever was computed from it stays from now on."""
        if self.rebuilds or any(not child.resident for child in node.children):
            return False
        for child in list(node.children):
            self.pin(child)
        return not node.children

    def release_constants(self, *, thorough: bool = False) -> bool:
        """Let go of constants that only calls hold, where nothing evicted would have to be computed from them.

        What was computed from them stays from then on. Unless ``thorough``, only where that is no more than what is let go;
        what was written from them does not count, such as the optimizer's state from a gradient, which would go on to hold the
        gradients of all steps. Whether anything went.
        """
        self.release_dead()
        gone = [node for node in list(self.read_constants) if not node.children or self._let_go(node, thorough)]
        for node in gone:
            self.read_constants.pop(node, None)
        return bool(gone)

    def _let_go(self, node: Node, thorough: bool) -> bool:
        if node.locks or not node.address or torch._C._storage_Use_Count(node.address) > 1:
            return False
        dependents = [dependent for dependent in dependents_of(node) if dependent.alive()]
        if any(d.locks or not d.resident for d in dependents):
            return False
        fresh = sum(d.bytes for d in dependents if d.place != WRITTEN or d not in node.children)
        if not thorough and fresh > node.size_bytes:
            return False
        for dependent in dependents:
            self.pin(dependent)
        return True

    def recover(self) -> None:
        """No operator is under way any more: the last one failed or was interrupted, between any two steps of it."""
        self.locked.clear()
        self.rebuilds = self.started = 0
        nodes = self._all_nodes()
        for node in nodes:
            node.locks = 0
            storage = node.storage()
            if node.handle is not None and self.nodes.get(node.address) is not node:
                node.handle = None  # a newer version has the storage
            if node.handle is not None and node.handle() is None:
                self.dead.append(node.handle)
            if node.call is not None and storage is not None and not is_empty(storage):
                if node.evicted:
                    node.kept = None
                    empty(storage)
                else:
                    node.resident = True
        self.pool.recover(nodes)
        self.release_dead()
        for node in nodes:
            self.release(node)

    def _all_nodes(self) -> list[Node]:
        """Every node that something can still lead to."""
        there = cast("Iterator[Node]", iter(self.pool))
        waiting = list(dict.fromkeys((*self.nodes.values(), *self.read_constants, *self.intermediates, *there)))
        seen = set(waiting)
        found = []
        while waiting:
            node = waiting.pop()
            found.append(node)
            fresh = [other for other in (*node.parents, *node.children) if other not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
        return found

    def clear(self) -> None:
        """Forget everything; all that is held must have been restored."""
        for node in self._all_nodes():
            node.call = node.kept = node.handle = None
            node.parents, node.children = (), {}
        for collection in (self.nodes, self.read_constants, self.intermediates, self.dead, self.locked):
            collection.clear()
        self.rebuilds = 0

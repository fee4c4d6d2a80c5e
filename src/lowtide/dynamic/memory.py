"""Tracks the storages of an online run: which the program holds, which are evicted, and which can be forgotten.

A storage becomes a node when it is first seen. A node is resident (its bytes are in memory) or evicted (its recorded call can
recompute it). Nodes that nothing needs any more are released, and then their parents. Storages that cannot be recomputed
(parameters, inputs, results of operators that run once) are constants: they have no call, and are never evicted.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, UntypedStorage

from lowtide.device import plain_types
from lowtide.dynamic import statistics
from lowtide.dynamic.failures import Refusal
from lowtide.dynamic.idle import Idle
from lowtide.dynamic.node import PREFERENCES, WRITTEN, Handle, Node, OperatorCall, is_opaque, storage_of
from lowtide.dynamic.recording import Recorder
from lowtide.dynamic.storages import empty, is_empty
from lowtide.eviction import Pool
from lowtide.memory.allocators import Meter

_LOG = logging.getLogger(__name__)
# Most time to spend looking for releasable constants, on top of the operators' time, if the run may exceed its budget.
_LOOKING_NS = 500_000_000


class Memory:
    """The nodes of a run, the locks of running operators, and the allocation limit.

    Hold ``lock`` to read or change it. ``policy``: "banish" forgets a released node as soon as no evicted node needs it,
    "ignore" keeps it until it is evicted. ``recorder`` and ``on_release`` are told of each storage that the program releases,
    ``on_eviction`` of each evicted one. ``limit_bytes``: limit on the level of ``meter``, ``None`` for no limit. ``refusal``:
    the most recent refused allocation (if the run ``may_exceed`` the limit, nothing is refused, and a warning is logged once).
    ``interruption``: the exception raised while making room inside the C++ allocator, which cannot propagate it.
    """

    def __init__(
        self, pool: Pool, meter: Meter, policy: str, recorder: Recorder | None, idle: Idle, may_exceed: bool
    ) -> None:
        self.pool, self.meter = pool, meter
        self.banish, self.ignore = policy == "banish", policy == "ignore"
        self.recorder = recorder
        self.may_exceed, self._said, self._looking_ns = may_exceed, False, 0
        self.on_release: Callable[[Node], None] | None = None
        self.on_eviction: Callable[[Node], None] | None = None
        self.limit_bytes: int | None = None
        self.refusal: Refusal | None = None
        self.interruption: BaseException | None = None
        self.lock = threading.RLock()
        self._is_plain = functools.cache(lambda device: device.type in plain_types())  # asking the device takes 0.5 us
        self.counters, self.idle = statistics.OnlineStatistics(), idle
        self.nodes: dict[int, Node] = {}  # by the address of the storage that the program holds
        self.dead: list[Handle] = []  # handles of freed storages that release_dead has not processed yet
        self.locked: list[tuple[Node, ...]] = []  # the nodes that each running operator needs, innermost last
        self.started = 0  # how many entries of locked, from the outermost, already execute
        self.rebuilds = self.rebuild_began_ns = 0  # nesting depth, start of the outermost
        # Nodes that the program released and that were rebuilt only to compute others, oldest first.
        self.intermediates: dict[Node, None] = {}
        self.read_constants: dict[Node, None] = {}  # constants that recorded calls read and whose storages they hold

    # --- what there is ---------------------------------------------------------------------------------------------

    def known(self, storage: UntypedStorage) -> Node | None:
        """Return the node of a storage, or ``None`` if it was not seen before."""
        node = self.nodes.get(storage._cdata)
        return node if node is not None and node.handle is not None and node.handle() is storage else None

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of the tensor's storage; add a constant if it was not seen before."""
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
            node = Node.constant()
            node.opaque = True
            return node
        return self.known(storage) or self.add_constant(storage, opaque=is_opaque(tensor))

    def add_constant(self, storage: UntypedStorage, *, opaque: bool = False) -> Node:
        """Add a constant node for a storage that cannot be recomputed."""
        node = Node.constant(storage.nbytes())
        node.opaque = opaque or not self._is_plain(storage.device)
        # Memory not owned by PyTorch, such as a NumPy array's, may be written without PyTorch seeing it.
        node.writers = int(not storage.resizable() and not storage.is_shared())
        self.own(node, storage)
        return node

    def own(self, node: Node, storage: UntypedStorage) -> None:
        """Bind the node to the storage in which the program holds its bytes."""
        handle = Handle(storage, self.dead.append)
        handle.node = node
        node.handle = handle
        node.address = storage._cdata
        self.nodes[node.address] = node

    def attach(self, node: Node, call: OperatorCall, storage: UntypedStorage | None, cost_ns: int, place: int) -> None:
        """Make the resident node in ``storage`` recomputable: it is result ``place`` of ``call``, which takes ``cost_ns``."""
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
        node.kept = storage if self.ignore else node.kept

    def lock_all(self, needs: Iterable[Node]) -> tuple[Node, ...]:
        """Lock the nodes that an operator about to run needs, so that they are not evicted before ``unlock_last``."""
        nodes = tuple(needs)
        for node in nodes:
            node.locks += 1
        self.locked.append(nodes)
        return nodes

    def unlock_last(self, nodes: tuple[Node, ...]) -> None:
        """Unlock ``nodes``, which the innermost running operator needed, when it ends."""
        self.locked.pop()
        for node in nodes:
            node.locks -= 1

    # --- evicting --------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Bytes between the allocated level and the limit."""
        return sys.maxsize if self.limit_bytes is None else self.limit_bytes - self.meter.level_bytes

    def room_bytes(self) -> int | None:
        """Free bytes plus the bytes of all evictable nodes, locked or not; ``None`` without a limit."""
        return None if self.limit_bytes is None else self.free_bytes() + self.pool.bytes

    def available_bytes(self) -> int:
        """Free bytes plus the bytes that could be evicted now."""
        return self.free_bytes() + self.pool.evictable_bytes()

    def make_room(self, wanted_bytes: int) -> bool:
        """Evict until ``wanted_bytes`` are free; return false (and set ``refusal``) if that is impossible."""
        while self.free_bytes() < wanted_bytes:
            enough = self.may_exceed and self.counters.hardly_goes_on(self.rebuild_began_ns if self.rebuilds else None)
            if self.idle.evict(self) if enough else self.evict_one():
                continue
            if not self.may_exceed:
                self.refusal = Refusal(wanted_bytes, self.meter.level_bytes, wanted_bytes - self.free_bytes())
                return False
            why = "most of the time went into computing again" if enough else "nothing more can be evicted"
            if not self._said:
                _LOG.warning("the online mode goes on above its budget: %s", why)
            self._said = True
            return True
        return True

    def take_failure(self) -> tuple[BaseException | None, Refusal | None]:
        """Return and clear the ``interruption`` and the ``refusal`` since the previous call."""
        failure = self.interruption, self.refusal
        self.interruption = self.refusal = None
        return failure

    def take_missing_bytes(self) -> int:
        """Return by how many bytes the last refused allocation exceeded the limit, 0 without one. Re-raises an interruption."""
        interruption, refusal = self.take_failure()
        if interruption is not None:
            raise interruption from None
        return 0 if refusal is None else refusal.missing_bytes

    def evict_one(self) -> bool:
        """Evict the node that the heuristic chooses; return false if none can be evicted."""
        began = statistics.now_ns()
        if (node := self._victim()) is not None:
            self.evict_counted(node, began)
        return node is not None

    def evict_planned(self, node: Node) -> None:
        """Evict the node because a plan says so, and count it as a planned eviction."""
        self.evict_counted(node, statistics.now_ns())
        self.counters.planned_evictions += 1

    def evict_counted(self, node: Node, began_ns: int) -> None:
        self.evict(node)
        if self.on_eviction is not None:
            self.on_eviction(node)
        self.counters.evictions += 1
        self.counters.evicted_bytes += node.size_bytes
        self.counters.evict_ns += statistics.now_ns() - began_ns

    def _victim(self) -> Node | None:
        self.release_dead()
        chosen = next((node for node in self.intermediates if not node.locks), None) or self._preferred()
        if chosen is None and self.release_constants(thorough=True):
            chosen = self._preferred()
        return chosen

    def _preferred(self) -> Node | None:
        return cast("Node | None", next(filter(None, map(self.pool.victim, PREFERENCES)), None))

    def evict(self, node: Node) -> None:
        """Free the node's bytes. Tensors on the storage keep it, empty."""
        storage = node.held_storage()
        self.pool.evict(node)
        self.intermediates.pop(node, None)
        node.kept = None
        if storage is not None:
            empty(storage)
        elif node.handle is None:
            self.release(node)

    def pin(self, node: Node) -> None:
        """Turn the resident node into a constant: forget how to recompute it, and never evict it."""
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

    # --- releasing nodes -------------------------------------------------------------------------------------------

    def release_dead(self) -> None:
        """Process the storages that the program has released since the previous call."""
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
                self.recorder.released(node)
            if self.on_release is not None:
                self.on_release(node)
            if (node.children or node.locks) and node.resident and node.call is not None and node.kept is None:
                self.pool.evict(node)
            self.release(node)

    def release(self, node: Node) -> None:
        """Forget the node if nothing needs it any more, and then its parents likewise."""
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
        """If all children are resident, pin them, so that the node is no longer needed. Returns whether it has none left."""
        if self.rebuilds or any(not child.resident for child in node.children):
            return False
        for child in list(node.children):
            self.pin(child)
        return not node.children

    def release_constants(self, *, thorough: bool = False) -> bool:
        """Release constants held only by recorded calls, if no evicted node would be recomputed from them.

        Pins what was computed from them. Unless ``thorough``, releases a constant only if the pinned bytes do not exceed its
        own; results of in-place writes do not count, such as optimizer state written from a gradient, which would otherwise
        hold the gradients of all steps. Returns whether any constant was released.
        """
        self.release_dead()
        if self.may_exceed and self._looking_ns > _LOOKING_NS + self.counters.operator_ns:
            return False
        began = statistics.now_ns()
        gone = [node for node in list(self.read_constants) if not node.children or self._let_go(node, thorough)]
        for node in gone:
            self.read_constants.pop(node, None)
        self._looking_ns += statistics.now_ns() - began
        return bool(gone)

    def _let_go(self, node: Node, thorough: bool) -> bool:
        if node.locks or not node.address or torch._C._storage_Use_Count(node.address) > 1:
            return False
        dependents = node.held_dependents()
        if dependents is None:
            return False
        fresh = sum(d.bytes for d in dependents if d.place != WRITTEN or d not in node.children)
        if not thorough and fresh > node.size_bytes:
            return False
        for dependent in dependents:
            self.pin(dependent)
        return True

    def recover(self) -> None:
        """Restore a consistent state after an operator failed or was interrupted at any point: none is running now."""
        self.locked.clear()
        self.rebuilds = self.started = 0
        nodes = self._all_nodes()
        for node in nodes:
            node.locks = 0
            storage = node.storage()
            if node.handle is not None and self.nodes.get(node.address) is not node:
                node.handle = None  # a newer version owns the storage
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
        """Return every node still reachable from the tables, the pool, or the parents and children of others."""
        known = (*self.nodes.values(), *self.read_constants, *self.intermediates, *cast("Iterable[Node]", self.pool))
        found = list(dict.fromkeys(known))
        seen = set(found)
        for node in found:
            fresh = [other for other in (*node.parents, *node.children) if other not in seen]
            seen.update(fresh)
            found.extend(fresh)
        return found

    def clear(self) -> None:
        """Forget all nodes. Storages that the program holds must have been restored before."""
        for node in self._all_nodes():
            node.call = node.kept = node.handle = None
            node.parents, node.children = (), {}
        for collection in (self.nodes, self.read_constants, self.intermediates, self.dead, self.locked):
            collection.clear()
        self.rebuilds = 0

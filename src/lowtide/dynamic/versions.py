"""New versions of storages that are written.

An operator that writes into a storage makes a new node, whose call reads the old one; the old one stays behind as a call alone.
A constant has one version: before it is written, what would have to be computed from its old contents is rebuilt and pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.dynamic.arguments import views_in
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import WRITTEN, Node, OperatorCall, dependents_of
from lowtide.dynamic.rebuild import Rebuilder, out_of_memory
from lowtide.errors import ExecutionError


class Versions:
    """Makes the versions of nodes in ``memory`` that are written."""

    def __init__(self, memory: Memory, rebuilder: Rebuilder) -> None:
        self.memory = memory
        self.rebuilder = rebuilder

    def supersede(
        self, call: OperatorCall, needs: tuple[Node, ...], targets: Sequence[Node], superseded: list[Node]
    ) -> Node | None:
        """Before the call, which needs those, writes ``targets``: new versions, which count as constants.

        Returns the version that the call can compute again, once it has run; ``superseded`` grows by the old ones.
        """
        for node in targets:
            if node.call is None:
                self.preserve_dependents(node)
        self.rebuilder.complete(needs)
        version = None
        for node in targets:
            if node.call is not None:
                version = self._new_version(node)
                superseded.append(node)
        again = len(targets) == 1 and not call.operator.once and not any(node.opaque or node.writers for node in needs)
        return version if again else None

    def _new_version(self, node: Node) -> Node:
        """A new version takes the storage of ``node`` over."""
        storage = node.held_storage()
        if storage is None:
            raise ExecutionError("a storage that nobody holds cannot be written")
        version = Node.constant(node.size_bytes)
        version.exported = node.exported
        version.number = node.number
        self.memory.own(version, storage)
        node.handle = node.kept = None
        if node.resident:
            self.memory.pool.evict(node)
        return version

    def written(self, version: Node, call: OperatorCall, reads: dict[Node, None], cost_ns: int) -> None:
        """The write succeeded: the version can be computed by it."""
        storage = version.storage()
        version.size_bytes = version.bytes = 0 if storage is None else storage.nbytes()
        version.parents = tuple(reads)
        version.pinned = version.exported
        self.memory.attach(version, call, storage, cost_ns, WRITTEN)

    def preserve_dependents(self, node: Node) -> None:
        """The contents of a constant are about to change: nothing may have to be computed from them.

        What is evicted and still held by the program is rebuilt; where the budget has no room for that, a copy of the old
        contents is kept instead. What was computed from them is pinned.
        """
        if not node.children:
            return
        memory = self.memory
        dependents = dependents_of(node)
        held = memory.lock_all([dependent for dependent in dependents if dependent.alive()])
        missing_bytes = sum(dependent.bytes for dependent in held if dependent.evicted)
        try:
            if missing_bytes > 0 and missing_bytes > memory.available_bytes():
                self._copy_aside(node)
                return
            self.rebuilder.complete(held)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            memory.take_missing_bytes()
            self._copy_aside(node)
            return
        finally:
            memory.unlock_last(held)
        for dependent in held:
            memory.pin(dependent)
        for dependent in dependents:
            if dependent.resident and dependent.call is not None:
                memory.evict(dependent)  # nobody but the engine holds it

    def _copy_aside(self, node: Node) -> None:
        """Another node takes the old contents and all that was computed from them."""
        storage = node.storage()
        if storage is None:
            raise ExecutionError("the contents of a released storage cannot be copied")
        copy = Node.constant(node.size_bytes)
        copy.kept = self.rebuilder.clone(storage)
        self.memory.counters.copies += 1
        for child in list(node.children):
            parents = [copy if parent is node else parent for parent in child.parents]
            self.memory.pool.cut(child)
            self.memory.pool.link(child, parents)
            if child.call is not None:
                for view in views_in(child.call.args, child.call.kwargs):
                    if view.node is node:
                        view.node = copy
                child.call.holds = [copy.kept if held is storage else held for held in child.call.holds]

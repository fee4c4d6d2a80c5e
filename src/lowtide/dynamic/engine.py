"""Runs operators, records the calls that made their results, and has evicted storages rebuilt before they are read.

Every storage that an operator allocates becomes a node that the recorded call can recompute. Below the budget nothing else
happens. When an allocation would exceed it, the missing room is made at once by evicting the storages that the heuristic
chooses (``memory``). Before an evicted storage is read, it is rebuilt with whatever that needs (``rebuild``).

An operator that writes into a storage makes a new version of it, whose call reads the old version; of the old version only the
call remains. A constant has one version: before it is written, nodes that depend on its old contents are rebuilt and
pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic.executor import Executor
from lowtide.dynamic.foresight import Foresight
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import (
    WRITTEN,
    Node,
    OperatorCall,
    Origin,
    View,
    any_evicted,
    blank,
    current_node,
    dependents_of,
    is_opaque,
    origin_of,
    parts_of,
    storage_of,
    tensors_of,
    views_in,
)
from lowtide.dynamic.operators import Operator, values_at
from lowtide.dynamic.patches import Access
from lowtide.dynamic.rebuild import Experience, Rebuilder, refused_bytes
from lowtide.errors import ExecutionError
from lowtide.program import generators

_RELEASE_EVERY = 256  # operators
_LENGTHS_BYTES = 1 << 16  # integer tensors up to this size are never evicted: PyTorch reads lengths unseen


class Engine:
    """Runs the operators of a process one at a time, whichever threads they come from.

    ``device``: the device under the budget; only its storages are evicted. ``tiny_bytes``: smaller results are never evicted.
    """

    def __init__(
        self,
        memory: Memory,
        executor: Executor,
        experience: Experience,
        *,
        device: torch.device,
        tiny_bytes: int = 0,
    ) -> None:
        self.memory = memory
        self.executor = executor
        self.device = device
        self.tiny_bytes = tiny_bytes
        self.rebuilder = Rebuilder(memory, executor, experience)
        self.foresight: Foresight | None = None
        self.release_at = _RELEASE_EVERY

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the program: rebuild what it reads, execute it, and record nodes for its results."""
        memory = self.memory
        if memory.dead:
            memory.release_dead()
        unread = operator.unread(args) if operator.statistics else ()
        call, reads = self._recorded(operator, args, kwargs, unread)
        node = current_node()
        # Nested contexts see the same operator one after the other.
        foresight = None if memory.locked else self.foresight
        if foresight is not None:
            foresight.before(operator, reads, backward=node is not None)
        superseded: list[Node] = []
        started = memory.started
        needs = memory.lock_all((*reads, *self._nodes_in([args[place] for place in unread])) if unread else reads)
        try:
            if memory.dead or any_evicted(needs):
                self.rebuilder.complete(needs)
            if operator.random:
                call.draw = generators.Draw(_generator(args, kwargs))
            version = None
            if writes := operator.writes + unread:
                targets = self._nodes_in(values_at(writes, args, kwargs))
                version = self._supersede(call, needs, targets, superseded)
            memory.started = len(memory.locked)
            if foresight is not None:
                foresight.starts()
            result, cost_ns = self.executor.run(operator, args, kwargs)
            if call.draw is not None and operator.with_generator(len(args)) is not None:
                call.draw.drawn()
            memory.counters.operators += 1
            memory.counters.operator_ns += cost_ns
            memory.pool.tick(cost_ns, reads)
            origin = origin_of(node)
            if version is not None:
                self._written(version, superseded[0], call, reads, cost_ns)
                version.origin = origin
            made = self._remember(result, call, reads, cost_ns, origin)
            if foresight is not None:
                versions = [memory.nodes[one.address] for one in superseded]
                foresight.after(operator, reads, made + versions, cost_ns)
            if memory.recorder is not None:
                written = self._nodes_in(values_at(writes, args, kwargs))
                memory.recorder.operator(operator, reads, made, written, cost_ns)
        finally:
            memory.started = started
            memory.unlock_last(needs)
            for one in superseded:
                memory.release(one)
        if memory.counters.operators >= self.release_at:
            self.release_at = memory.counters.operators + _RELEASE_EVERY
            memory.release_constants()
        return result

    def _recorded(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], unread: tuple[int, ...]
    ) -> tuple[OperatorCall, dict[Node, None]]:
        """Return the call with views in place of tensors and without arguments ``unread``, and the nodes that it reads."""
        reads: dict[Node, None] = {}
        if operator.geometry_only:
            if kwargs.get("device") is None:
                kwargs = {**kwargs, "device": args[0].device}
            return OperatorCall(operator, [blank(v) if isinstance(v, Tensor) else v for v in args], kwargs), reads
        given = [None if place in unread else value for place, value in enumerate(args)] if unread else args
        views = self._without_tensors(given, reads)
        if kwargs:
            kwargs = dict(zip(kwargs, self._without_tensors(kwargs.values(), reads), strict=True))
        return OperatorCall(operator, views, kwargs), reads

    def _without_tensors(self, values: Iterable[Any], reads: dict[Node, None]) -> list[Any]:
        """Return ``values`` with tensors replaced by ``_view`` of them, and tuples by lists."""
        return [
            self._view(value, reads)
            if isinstance(value, Tensor)
            else self._without_tensors(value, reads)
            if isinstance(value, (list, tuple))
            else value
            for value in values
        ]

    def _view(self, tensor: Tensor, reads: dict[Node, None]) -> Any:
        """Return a tensor's recorded form: a ``View``, or the tensor itself if opaque. Adds its nodes to ``reads``."""
        node = self.memory.node_of(tensor)
        reads[node] = None
        if not node.opaque:
            if not is_opaque(tensor):
                return View(node, tensor)
            node.opaque = node.pinned = True  # built on a plain storage seen before, which must stay
        for part in parts_of(tensor):
            inner = self.memory.node_of(part)
            inner.pinned = True
            reads[inner] = None
        return tensor

    def _remember(
        self, result: Any, call: OperatorCall, reads: dict[Node, None], cost_ns: int, origin: Origin
    ) -> list[Node]:
        """Create nodes for the new storages among the results, and return them."""
        made = []
        memory, operator = self.memory, call.operator
        again = operator.can_repeat(call.args, self.device)
        for node in reads:
            if node.opaque or node.writers:
                again = False
        for place, tensor in enumerate(tensors_of(result)):
            try:
                storage = storage_of(tensor)
            except (NotImplementedError, RuntimeError):
                continue
            if memory.known(storage) is not None:
                continue
            size_bytes = storage.nbytes()
            if again and self._is_worth_evicting(tensor, size_bytes):
                node = Node(size_bytes, tuple(reads))
                memory.attach(node, call, storage, cost_ns, place)
            else:
                node = memory.add_constant(storage, opaque=is_opaque(tensor))
            node.origin = origin
            made.append(node)
        return made

    def _is_worth_evicting(self, tensor: Tensor, size_bytes: int) -> bool:
        if size_bytes <= self.tiny_bytes or is_opaque(tensor) or tensor.device != self.device:
            return False
        return size_bytes > _LENGTHS_BYTES or tensor.is_floating_point() or tensor.is_complex()

    def _nodes_in(self, values: list[Any]) -> list[Node]:
        return list(dict.fromkeys(self.memory.node_of(tensor) for tensor in tensors_of(values)))

    # --- writing ---------------------------------------------------------------------------------------------------

    def _supersede(
        self, call: OperatorCall, needs: tuple[Node, ...], targets: Sequence[Node], superseded: list[Node]
    ) -> Node | None:
        """Create new versions, constants for now, of ``targets`` before the call, which needs ``needs``, writes them.

        Returns the version that the call will be able to recompute, if any; appends old versions to ``superseded``.
        """
        for node in targets:
            if node.call is None:
                self._preserve_dependents(node)
        self.rebuilder.complete(needs)
        version = None
        for node in targets:
            if node.call is not None:
                version = self._new_version(node)
                superseded.append(node)
        again = len(targets) == 1 and not call.operator.once and not any(node.opaque or node.writers for node in needs)
        return version if again else None

    def _new_version(self, node: Node) -> Node:
        """Return a new version that takes over the storage of ``node``."""
        storage = node.held_storage()
        if storage is None:
            raise ExecutionError("a storage that nobody holds cannot be written")
        version = Node.constant(node.size_bytes)
        version.number = node.number
        self.memory.own(version, storage)
        node.handle = node.kept = None
        if node.resident:
            self.memory.pool.evict(node)
        return version

    def _written(self, version: Node, old: Node, call: OperatorCall, reads: dict[Node, None], cost_ns: int) -> None:
        """Record, after the write, that ``call`` recomputes ``version`` from the old version."""
        storage = version.storage()
        version.size_bytes = version.bytes = 0 if storage is None else storage.nbytes()
        version.parents = tuple(reads)
        version.pinned = old.pinned
        self.memory.attach(version, call, storage, cost_ns, WRITTEN)

    def _preserve_dependents(self, node: Node) -> None:
        """Make sure that nothing needs a constant's contents for recomputation before they change.

        Rebuilds and pins the dependents that the program still holds; if the budget has no room for that, keeps a copy of the
        old contents instead.
        """
        if not node.children:
            return
        memory = self.memory
        dependents = dependents_of(node)
        held = memory.lock_all([dependent for dependent in dependents if dependent.alive()])
        try:
            are_there = self._completed(held)
        finally:
            memory.unlock_last(held)
        if not are_there:
            self._copy_aside(node)
            return
        for dependent in held:
            memory.pin(dependent)
        for dependent in dependents:
            if dependent.resident and dependent.call is not None:
                memory.evict(dependent)  # only the engine holds it

    def _completed(self, nodes: Sequence[Node]) -> bool:
        """Rebuild all of these nodes if the budget has room; return whether it had."""
        missing_bytes = sum(node.bytes for node in nodes if node.evicted)
        if missing_bytes > 0 and missing_bytes > self.memory.available_bytes():
            return False
        try:
            self.rebuilder.complete(nodes)
        except RuntimeError as error:
            refused_bytes(error, self.memory)
            return False
        return True

    def _copy_aside(self, node: Node) -> None:
        """Copy the contents to a new constant, and make it the parent of everything computed from them."""
        storage = node.storage()
        assert storage is not None
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

    # --- from outside ----------------------------------------------------------------------------------------------

    def materialize(self, tensor: Tensor, access: Access) -> Callable[[], None] | None:
        """Make the tensor's bytes resident: for ``READ`` until the returned callback is called, else as long as it lives.

        For ``WRITE``, unseen writes may follow: pins the tensor's node and what was computed from it. For ``SHARE``, nothing
        computed from it later is recomputable either, until the returned callback is called.
        """
        node = self.memory.node_of(tensor)
        if node.evicted:
            self.rebuilder.rebuild([node])
        if access is Access.READ:
            return node.held()
        node.pinned = True
        if access is not Access.EXPORT:
            self._preserve_dependents(node)
            self.memory.pin(node)
        if access is not Access.SHARE:
            return None
        node.writers += 1
        return node.end_writer

    def let_go(self, storage: UntypedStorage) -> None:
        """Prepare for a resize of the storage: rebuild it, preserve its dependents, and make it a constant."""
        node = self.memory.known(storage)
        if node is None:
            return
        if node.evicted:
            self.rebuilder.rebuild([node])
        self._preserve_dependents(node)
        self.memory.pin(node)

    def restore_all(self) -> None:
        """Rebuild every evicted storage that the program still holds."""
        self.memory.release_dead()
        nodes = self.memory.nodes.values()
        if not any_evicted(nodes):
            return
        held = self.memory.lock_all([node for node in nodes if node.alive()])
        try:
            self.rebuilder.complete(held)
        finally:
            self.memory.unlock_last(held)


def _generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the random generator from which a call with these arguments draws."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device") or next((value.device for value in args if isinstance(value, Tensor)), None)
    return generators.default_generator(torch.device(device or "cpu"))

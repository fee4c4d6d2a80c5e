"""Runs operators, remembers how their results came about, and has evicted storages rebuilt before they are read.

Every storage that an operator allocates is a node; the operator's call is its record. Below the budget nothing else happens.
Where an allocation would exceed it, the room that is missing is made at once, by emptying the storages that the heuristic
chooses (``memory``). Whoever reads an emptied storage has it rebuilt first, with whatever that needs (``rebuild``).

Writes are versions. An operator that writes into a storage makes a new node, whose record reads the old one; the old one
stays behind as a record alone. What can not be computed again has one node without a record; before it is written, what would
have to be computed from its old contents is rebuilt and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic import random_state, tally
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import (
    WRITTEN,
    Geometry,
    Node,
    Origin,
    Piece,
    Record,
    dependents_of,
    pieces_in,
    storage_of,
    tensors_of,
)
from lowtide.dynamic.operators import Operator, values_at
from lowtide.dynamic.rebuild import Execute, Rebuilder, out_of_memory
from lowtide.dynamic.touch import Access
from lowtide.errors import ExecutionError
from lowtide.eviction import Pool
from lowtide.trace import TraceWriter

_CPU = torch.device("cpu")
_SWEEP_EVERY = 256  # operators
_LENGTHS_BYTES = 1 << 16  # integers up to this size are kept: PyTorch reads lengths where nobody can notice


class Engine:
    """The state of the live mode; one for the process, whichever threads take part.

    ``device``: the memory that is short; storages elsewhere stay. ``execute``: runs an operator once everything that it
    reads is in place. ``tiny_bytes``: results of at most that size are kept. ``banish`` and ``ignore``: see ``Memory``.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        device: torch.device = _CPU,
        tiny_bytes: int = 0,
        banish: bool = False,
        ignore: bool = False,
    ) -> None:
        self.pool = pool
        self.device = device
        self.tiny_bytes = tiny_bytes
        self.memory = Memory(pool, banish=banish, ignore=ignore)
        self.memory.on_release = self._note_release
        self.tally = self.memory.tally
        self.lock = threading.RLock()
        self.noted: set[int] = set()  # the numbers that the recorder knows
        self.execute: Execute = self._execute
        self.rebuilder = Rebuilder(self.memory, lambda *call: self.execute(*call))  # a room may replace it
        self.sweep_at = _SWEEP_EVERY
        self.recorder: TraceWriter | None = None

    @property
    def idle(self) -> bool:
        """Whether no operator is under way."""
        return not self.memory.frames

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator of the program, with everything it reads in place; its results are remembered."""
        memory = self.memory
        if memory.dead:
            memory.bury()
        writes = operator.writes
        left_out: tuple[int, ...] = ()
        if operator.statistics is not None:
            left_out = _updated_statistics(operator.statistics, args)
            writes += left_out
        reads: dict[Node, None] = {}
        record = self._record(operator, args, kwargs, reads, left_out)
        superseded: list[Node] = []
        running = memory.running
        needs = memory.open((*reads, *self._nodes_at(left_out, args)))
        try:
            self.rebuilder.complete(needs)
            if operator.random:
                record.generator = random_state.save(args, kwargs)
            version = self._write(record, needs, values_at(writes, args, kwargs), superseded) if writes else None
            memory.running = len(memory.frames)
            result, cost_ns = self.execute(operator, args, kwargs)
            self.tally.operators += 1
            self.tally.operator_ns += cost_ns
            pool = self.pool
            pool.clock_ns += cost_ns
            for node in reads:
                node.accessed_ns = pool.clock_ns
            origin = _origin()
            if version is not None:
                self._written(version, record, reads, cost_ns)
                version.origin = origin
            made = self._remember(result, record, reads, cost_ns, again=not operator.once and not operator.writes)
            for node in made:
                node.origin = origin
            if self.recorder is not None:
                self._note(
                    self.recorder, operator, reads, made, self._nodes_in(values_at(writes, args, kwargs)), cost_ns
                )
        finally:
            memory.running = running
            memory.close(needs)
            for node in superseded:
                memory.release(node)
        if self.tally.operators >= self.sweep_at:
            self.sweep_at = self.tally.operators + _SWEEP_EVERY
            memory.sweep()
        return result

    def _execute(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        return self.timed(operator.run, args, kwargs)

    def timed(self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What the operator returns, and the nanoseconds that it took by itself."""
        evict_ns = self.tally.evict_ns
        began = tally.now_ns()
        result = run(*args, **kwargs)
        return result, tally.now_ns() - began - (self.tally.evict_ns - evict_ns)

    def _record(
        self,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: dict[Node, None],
        left_out: tuple[int, ...],
    ) -> Record:
        if operator.geometry_only:
            return Record(operator, [_geometry(value) for value in args], kwargs)
        frozen = [None if left_out and place in left_out else self._freeze(a, reads) for place, a in enumerate(args)]
        for name, value in kwargs.items():
            if isinstance(value, (Tensor, list, tuple)):
                kwargs = {**kwargs, name: self._freeze(value, reads)}
        return Record(operator, frozen, kwargs)

    def _freeze(self, value: Any, reads: dict[Node, None]) -> Any:
        """The argument with pieces in place of tensors; ``reads`` grows by their nodes."""
        if isinstance(value, Tensor):
            node = self.memory.node_of(value)
            reads[node] = None
            if not node.opaque:
                return Piece(node, value)
            for part in _parts(value):
                inner = self.memory.node_of(part)
                inner.exported = inner.pinned = True
                reads[inner] = None
            return value
        if isinstance(value, (list, tuple)):
            return [self._freeze(item, reads) for item in value]
        return value

    def _remember(
        self, result: Any, record: Record, reads: dict[Node, None], cost_ns: int, *, again: bool
    ) -> list[Node]:
        """Nodes for the storages that the results are on, where they are new."""
        made = []
        again = again and not any(node.opaque or node.writers for node in reads)
        for place, tensor in enumerate(tensors_of(result)):
            try:
                storage = storage_of(tensor)
            except (NotImplementedError, RuntimeError):
                continue
            known = self.memory.nodes.get(storage._cdata)
            if known is not None and known.handle is not None and known.handle() is storage:
                continue
            if not again or not self._can_run_again(record, tensor, storage):
                made.append(self.memory.adopt(storage, opaque=tensor.is_quantized))
                continue
            node = Node(storage.nbytes(), tuple(reads))
            made.append(node)
            node.cost_ns = cost_ns
            node.place = place
            self.memory.attach(node, record)
            self.memory.own(node, storage)
            self.pool.enter(node)
            if self.memory.ignore:
                node.kept = storage
        return made

    def _note(
        self,
        recorder: TraceWriter,
        operator: Operator,
        reads: Iterable[Node],
        made: list[Node],
        written: list[Node],
        ns: int,
    ) -> None:
        """Write the call to the trace, after the storages that came from elsewhere."""
        for node in (*reads, *written):
            if node.number not in self.noted:
                self.noted.add(node.number)
                recorder.constant(node.number, node.size_bytes)
        self.noted.update(node.number for node in made)
        recorder.call(
            operator.name,
            ns,
            [node.number for node in reads],
            [(node.number, node.size_bytes) for node in made],
            writes=[node.number for node in written],
            random=operator.random,
            once=operator.once,
        )

    def _note_release(self, node: Node) -> None:
        if self.recorder is not None and node.number in self.noted:
            self.recorder.release(node.number)

    def _nodes_in(self, values: list[Any]) -> list[Node]:
        return list(dict.fromkeys(self.memory.node_of(tensor) for tensor in tensors_of(values)))

    def _nodes_at(self, positions: tuple[int, ...], args: tuple[Any, ...]) -> list[Node]:
        return [self.memory.node_of(args[at]) for at in positions if isinstance(args[at], Tensor)]

    def _can_run_again(self, record: Record, tensor: Tensor, storage: UntypedStorage) -> bool:
        if storage.nbytes() <= self.tiny_bytes or tensor.is_quantized or storage.device != self.device:
            return False
        if storage.nbytes() <= _LENGTHS_BYTES and not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        return not (self.device.type == "cuda" and record.operator.nondeterministic_on_cuda)

    # --- writing ---------------------------------------------------------------------------------------------------

    def _write(
        self, record: Record, needs: tuple[Node, ...], written: list[Any], superseded: list[Node]
    ) -> Node | None:
        """Before an operator writes: new versions, which count as ones that can not be computed again.

        Returns the version that can be, once the operator has run; ``superseded`` grows by the old ones.
        """
        targets = self._nodes_in(written)
        for node in targets:
            if node.record is None:
                self._lose(node)
        self.rebuilder.complete(needs)
        version = None
        for node in targets:
            if node.record is not None:
                version = self._supersede(node)
                superseded.append(node)
        again = (
            len(targets) == 1 and not record.operator.once and not any(node.opaque or node.writers for node in needs)
        )
        return version if again else None

    def _supersede(self, node: Node) -> Node:
        """A new version takes the storage of ``node`` over."""
        storage = node.handle() if node.handle is not None else None
        if storage is None:
            raise ExecutionError("a storage that nobody holds cannot be written")
        version = Node(0)
        version.size_bytes = node.size_bytes
        version.pinned = version.resident = True
        version.exported = node.exported
        version.number = node.number
        self.memory.own(version, storage)
        node.handle = node.kept = None
        if node.resident:
            self.pool.evict(node)
        return version

    def _written(self, version: Node, record: Record, reads: dict[Node, None], cost_ns: int) -> None:
        """The write succeeded: the version can be computed by it."""
        storage = version.storage()
        version.size_bytes = version.bytes = 0 if storage is None else storage.nbytes()
        version.parents = tuple(reads)
        version.cost_ns = cost_ns
        version.place = WRITTEN
        version.pinned = version.exported
        self.memory.attach(version, record)
        self.pool.enter(version)
        if self.memory.ignore:
            version.kept = storage

    def _lose(self, node: Node) -> None:
        """The contents of a node without record are about to change: nothing may have to be computed from them.

        What is evicted and still held by the program is rebuilt; where the budget has no room for that, a copy of the old
        contents is kept instead. What was computed from them counts as not to be computed again.
        """
        if not node.children:
            return
        dependents = dependents_of(node)
        frame = self.memory.open([dependent for dependent in dependents if dependent.alive()])
        missing_bytes = sum(dependent.bytes for dependent in frame if dependent.evicted)
        try:
            if missing_bytes > 0 and missing_bytes > self.memory.room_bytes():
                self._copy_aside(node)
                return
            self.rebuilder.complete(frame)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.memory.refused_bytes()
            self._copy_aside(node)
            return
        finally:
            self.memory.close(frame)
        for dependent in frame:
            self.memory.keep(dependent)
        for dependent in dependents:
            if dependent.resident and dependent.record is not None:
                self.memory.evict(dependent)  # nobody but the engine holds it

    def _copy_aside(self, node: Node) -> None:
        """Another node takes the old contents and all that was computed from them."""
        storage = node.storage()
        if storage is None:
            raise ExecutionError("the contents of a released storage cannot be copied")
        copy = Node(0)
        copy.size_bytes = node.size_bytes
        copy.pinned = copy.resident = True
        copy.kept = self.rebuilder.clone(storage)
        self.tally.copies += 1
        for child in list(node.children):
            parents = [copy if parent is node else parent for parent in child.parents]
            self.pool.cut(child)
            self.pool.link(child, parents)
            if child.record is not None:
                _replace(child.record, node, copy)
                child.record.holds = [copy.kept if s is storage else s for s in child.record.holds]

    # --- from outside ----------------------------------------------------------------------------------------------

    def touch(self, tensor: Tensor, access: Access) -> Callable[[], None] | None:
        """Make sure that the tensor's bytes are there; from ``EXPORT`` on, for as long as it lives.

        With ``SHARE`` they may change unseen, until what is returned is called: what was computed from them stays.
        """
        node = self.memory.node_of(tensor)
        if node.evicted:
            self.rebuilder.rebuild([node])
        if access is Access.READ:
            return None
        node.exported = node.pinned = True
        if access is Access.EXPORT:
            return None
        self._lose(node)
        self.memory.keep(node)
        node.writers += 1
        return node.end_writer

    def detached(self, tensor: Tensor) -> None:
        """The tensor is detached, perhaps as the gradient that is handed to a leaf."""
        if _origin() is Origin.GRADIENT:
            self.memory.node_of(tensor).origin = Origin.GRADIENT

    def restore_all(self) -> None:
        """Rebuild whatever the program still holds."""
        self.memory.bury()
        frame = self.memory.open([node for node in self.memory.nodes.values() if node.alive()])
        try:
            self.rebuilder.complete(frame)
        finally:
            self.memory.close(frame)


def _origin() -> Origin:
    """Of what is computed now."""
    node = torch._C._current_autograd_node()
    if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
        return Origin.GRADIENT
    return Origin.FORWARD if node is None or torch.is_grad_enabled() else Origin.BACKWARD


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _updated_statistics(statistics: tuple[tuple[int, ...], int], args: tuple[Any, ...]) -> tuple[int, ...]:
    """The positions of running statistics: written and never read in training, read and never written otherwise."""
    positions, flag = statistics
    return positions if len(args) > flag and args[flag] else ()


def _geometry(value: Any) -> Any:
    return Geometry(value) if isinstance(value, Tensor) else value


def _replace(record: Record, old: Node, new: Node) -> None:
    for piece in pieces_in([*record.args, *record.kwargs.values()]):
        if piece.node is old:
            piece.node = new

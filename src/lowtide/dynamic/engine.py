"""Runs operators, remembers how their results came about, evicts and rebuilds storages.

Every storage that an operator allocates is a node; the operator's call is its record. Below the budget nothing else happens.
Where an allocation would exceed it, the room that is missing is made at once, by emptying the storages that the heuristic
chooses. Whoever reads an emptied storage has it rebuilt first, with whatever that needs.

Writes are versions. An operator that writes into a storage makes a new node, whose record reads the old one; the old one
stays behind as a record alone. What can not be computed again (parameters, inputs, results of operators that run once) has
one node without a record; before it is written, what would have to be computed from its old contents is rebuilt and kept.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic import random_state
from lowtide.dynamic.ancestry import Ancestry
from lowtide.dynamic.node import WRITTEN, Geometry, Handle, Node, Piece, Record, storage_of, tensors_of
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.orders import Orders
from lowtide.dynamic.plan import Plan, Step, make_plan, with_what_is_there
from lowtide.dynamic.storages import empty, fill, is_empty
from lowtide.dynamic.touch import Access
from lowtide.errors import ExecutionError
from lowtide.eviction import Entry, Pool
from lowtide.trace import TraceWriter

Execute = Callable[[Operator, Sequence[Any], dict[str, Any]], tuple[Any, int]]
_now = time.perf_counter_ns
_PLAIN_DEVICES = ("cpu", "cuda")
_CPU = torch.device("cpu")
_CLONE = Operator(torch.ops.aten.clone.default)
_SWEEP_EVERY = 256  # operators
# What takes more operators than this to have back goes last: gradients above all, behind which the whole backward pass lies.
_FEW = 32
_ATTEMPTS = 30  # at a rebuild, each of which finds out what scratch one more operator takes


class Tally:
    """What has happened so far: counts, and nanoseconds of wall time."""

    def __init__(self) -> None:
        self.operators = 0
        self.operator_ns = 0
        self.evictions = 0
        self.evicted_bytes = 0
        self.evict_ns = 0
        self.rematerializations = 0
        self.rematerialize_ns = 0
        self.copies = 0

    def copy(self) -> Tally:
        copy = Tally()
        copy.__dict__.update(self.__dict__)
        return copy


class RebuildError(RuntimeError):
    """What was evicted can not be rebuilt within the budget; no plan was found that would do with less than that."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"no plan was found for a rebuild without {missing_bytes} bytes more")
        self.missing_bytes = missing_bytes


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


class Engine:
    """The state of the live mode; one for the process, whichever threads take part.

    ``device``: the memory that is short; storages elsewhere stay. ``execute``: runs an operator once everything that it
    reads is in place. ``tiny_bytes``: results of at most that size are kept. ``banish``: forget what the program released
    as soon as nothing evicted needs it. ``ignore``: keep what the program released until it is evicted.
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
        self.banish = banish
        self.ignore = ignore
        self.tally = Tally()
        self.lock = threading.RLock()
        self.nodes: dict[int, Node] = {}  # by the address of the storage that the program holds
        self.dead: list[Handle] = []  # handles of storages that are gone, not yet looked at
        self.frames: list[tuple[Node, ...]] = []  # what the operators under way need, the innermost last
        self.plans: list[Plan] = []  # the rebuilds under way, the innermost last
        self.noted: set[int] = set()  # the numbers that the recorder knows
        self.spare: dict[Node, None] = {}  # rebuilt for others though the program released them, the oldest first
        self.held: dict[Node, None] = {}  # without a record, and records read them
        self.running = 0  # of the frames, those whose operators were started
        self.orders = Orders()
        self.scratch_bytes: dict[Hashable, int] = {}  # what kinds of calls were found to take beyond their results
        self.refused_bytes: Callable[[], int] = lambda: 0  # by which the last allocation exceeded the limit; asked once
        self.free_bytes: Callable[[], int] = lambda: sys.maxsize  # below the limit
        self.execute: Execute = self._execute
        self.sweep_at = _SWEEP_EVERY
        self.recorder: TraceWriter | None = None

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator of the program, with everything it reads in place; its results are remembered."""
        if self.dead:
            self._bury()
        writes = operator.writes
        left_out: tuple[int, ...] = ()
        if operator.statistics is not None:
            left_out = _updated_statistics(operator.statistics, args)
            writes += left_out
        reads: dict[Node, None] = {}
        record = self._record(operator, args, kwargs, reads, left_out)
        superseded: list[Node] = []
        running = self.running
        needs = self._open((*reads, *self._nodes_at(left_out, args)))
        try:
            self._complete(needs)
            if operator.random:
                record.generator = random_state.save(args, kwargs)
            version = self._write(record, needs, _at(writes, args, kwargs), superseded) if writes else None
            self.running = len(self.frames)
            result, cost_ns = self.execute(operator, args, kwargs)
            self.tally.operators += 1
            self.tally.operator_ns += cost_ns
            pool = self.pool
            pool.clock_ns += cost_ns
            for node in reads:
                node.accessed_ns = pool.clock_ns
            if version is not None:
                self._written(version, record, reads, cost_ns)
            made = self._remember(result, record, reads, cost_ns, again=not operator.once and not operator.writes)
            if self.recorder is not None:
                self._note(self.recorder, operator, reads, made, self._nodes_in(_at(writes, args, kwargs)), cost_ns)
        finally:
            self.running = running
            self._close(needs)
            for node in superseded:
                self._release(node)
        if self.tally.operators >= self.sweep_at:
            self.sweep_at = self.tally.operators + _SWEEP_EVERY
            self._sweep()
        return result

    def _execute(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        return self.timed(operator.run, args, kwargs)

    def timed(self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What the operator returns, and the nanoseconds that it took by itself."""
        evict_ns = self.tally.evict_ns
        began = _now()
        result = run(*args, **kwargs)
        return result, _now() - began - (self.tally.evict_ns - evict_ns)

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
            node = self._node_of(value)
            reads[node] = None
            if not node.opaque:
                return Piece(node, value)
            for part in _parts(value):
                inner = self._node_of(part)
                inner.exported = inner.pinned = True
                reads[inner] = None
            return value
        if isinstance(value, (list, tuple)):
            return [self._freeze(item, reads) for item in value]
        return value

    def _node_of(self, tensor: Tensor) -> Node:
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
            return _opaque()
        node = self.nodes.get(storage._cdata)
        if node is None or node.handle is None or node.handle() is not storage:
            node = self._adopt(storage, opaque=tensor.is_quantized)
        return node

    def _adopt(self, storage: UntypedStorage, *, opaque: bool = False) -> Node:
        """A storage from elsewhere: it can not be computed again."""
        node = Node(0)
        node.size_bytes = storage.nbytes()
        node.resident = node.pinned = True
        node.opaque = opaque or storage.device.type not in _PLAIN_DEVICES
        # Memory that is not PyTorch's own, such as a NumPy array's, may be written without anybody noticing.
        node.writers = int(not storage.resizable() and not storage.is_shared())
        self._own(node, storage)
        return node

    def _own(self, node: Node, storage: UntypedStorage) -> None:
        handle = Handle(storage, self.dead.append)
        handle.node = node
        node.handle = handle
        node.address = storage._cdata
        self.nodes[node.address] = node

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
            known = self.nodes.get(storage._cdata)
            if known is not None and known.handle is not None and known.handle() is storage:
                continue
            if not again or not self._can_run_again(record, tensor, storage):
                made.append(self._adopt(storage, opaque=tensor.is_quantized))
                continue
            node = Node(storage.nbytes(), tuple(reads))
            made.append(node)
            node.cost_ns = cost_ns
            node.place = place
            self._attach(node, record)
            self._own(node, storage)
            self.pool.enter(node)
            if self.ignore:
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

    def _nodes_in(self, values: list[Any]) -> list[Node]:
        return list(dict.fromkeys(self._node_of(tensor) for tensor in tensors_of(values)))

    def _can_run_again(self, record: Record, tensor: Tensor, storage: UntypedStorage) -> bool:
        if storage.nbytes() <= self.tiny_bytes or tensor.is_quantized or storage.device != self.device:
            return False
        return not (self.device.type == "cuda" and record.operator.nondeterministic_on_cuda)

    def _attach(self, node: Node, record: Record) -> None:
        """The node can be computed by the record."""
        if not record.results:
            for parent in node.parents:
                if parent.record is None and (storage := parent.storage()) is not None:
                    record.holds.append(storage)
                    self.held[parent] = None
        record.results[node.place] = node
        node.record = record

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
        self._complete(needs)
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
        self._own(version, storage)
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
        self._attach(version, record)
        self.pool.enter(version)
        if self.ignore:
            version.kept = storage

    def _lose(self, node: Node) -> None:
        """The contents of a node without record are about to change: nothing may have to be computed from them.

        What is evicted and still held by the program is rebuilt; where the budget has no room for that, a copy of the old
        contents is kept instead. What was computed from them counts as not to be computed again.
        """
        if not node.children:
            return
        dependents = _dependents(node)
        frame = self._open([dependent for dependent in dependents if dependent.alive()])
        missing_bytes = sum(dependent.bytes for dependent in frame if dependent.evicted)
        try:
            if missing_bytes > 0 and missing_bytes > self.room_bytes():
                self._copy_aside(node)
                return
            self._complete(frame)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            self.refused_bytes()
            self._copy_aside(node)
            return
        finally:
            self._close(frame)
        for dependent in frame:
            self.keep(dependent)
        for dependent in dependents:
            if dependent.resident and dependent.record is not None:
                self._evict(dependent)  # nobody but the engine holds it

    def _copy_aside(self, node: Node) -> None:
        """Another node takes the old contents and all that was computed from them."""
        storage = node.storage()
        if storage is None:
            raise ExecutionError("the contents of a released storage cannot be copied")
        copy = Node(0)
        copy.size_bytes = node.size_bytes
        copy.pinned = copy.resident = True
        copy.kept = self._clone(storage)
        self.tally.copies += 1
        for child in list(node.children):
            parents = [copy if parent is node else parent for parent in child.parents]
            self.pool.cut(child)
            self.pool.link(child, parents)
            if child.record is not None:
                _replace(child.record, node, copy)
                child.record.holds = [copy.kept if s is storage else s for s in child.record.holds]

    def _clone(self, storage: UntypedStorage) -> UntypedStorage:
        """A copy from the allocator that is counted, which is not where ``UntypedStorage.clone`` takes it from."""
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy, _ = self.execute(_CLONE, (tensor,), {})
        return storage_of(copy)

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
            self._release(parent)

    # --- evicting and rebuilding -----------------------------------------------------------------------------------

    def evict_one(self) -> bool:
        """Empty the storage that the heuristic chooses; false where none can go."""
        began = _now()
        node = self._victim()
        if node is None:
            return False
        self._evict(node)
        self.tally.evictions += 1
        self.tally.evicted_bytes += node.size_bytes
        self.tally.evict_ns += _now() - began
        return True

    def _victim(self) -> Node | None:
        if self.dead:
            self._bury()
        spare = next((node for node in self.spare if not node.locks), None)
        if spare is not None:
            return spare
        chosen = self.pool.victim(_near) or self.pool.victim()
        if chosen is None and self._sweep(thorough=True):
            chosen = self.pool.victim()
        return cast("Node | None", chosen)

    def room_bytes(self) -> int:
        """What is free, and what could be evicted."""
        return self.free_bytes() + self.pool.evictable_bytes()

    def _sweep(self, *, thorough: bool = False) -> bool:
        """Let go of what only records hold, where nothing evicted would have to be computed from it.

        What was computed from it stays from then on. Unless ``thorough``, only where that is no more than what is let go; what
        was written from it does not count, such as the optimizer's state from a gradient, which would go on to hold the
        gradients of all steps. Whether anything went.
        """
        self._bury()
        gone = [node for node in list(self.held) if not node.children or self._let_go(node, thorough=thorough)]
        for node in gone:
            self.held.pop(node, None)
        return bool(gone)

    def _let_go(self, node: Node, *, thorough: bool) -> bool:
        if node.locks or not node.address or torch._C._storage_Use_Count(node.address) > 1:
            return False
        dependents = [dependent for dependent in _dependents(node) if dependent.alive()]
        if any(d.locks or not d.resident for d in dependents):
            return False
        fresh = sum(d.bytes for d in dependents if d.place != WRITTEN or d not in node.children)
        if not thorough and fresh > node.size_bytes:
            return False
        for dependent in dependents:
            self.keep(dependent)
        return True

    def _evict(self, node: Node) -> None:
        storage = node.handle() if node.handle is not None else None
        self.pool.evict(node)
        self.spare.pop(node, None)
        node.kept = None
        if storage is not None:
            empty(storage)
        elif node.handle is None:
            self._release(node)

    def _nodes_at(self, positions: tuple[int, ...], args: tuple[Any, ...]) -> list[Node]:
        return [self._node_of(args[at]) for at in positions if isinstance(args[at], Tensor)]

    def _open(self, needs: Iterable[Node]) -> tuple[Node, ...]:
        """An operator that needs these is under way."""
        frame = tuple(needs)
        for node in frame:
            node.locks += 1
        self.frames.append(frame)
        return frame

    def _close(self, frame: tuple[Node, ...]) -> None:
        self.frames.pop()
        for node in frame:
            node.locks -= 1

    def _complete(self, needs: Iterable[Node]) -> None:
        """Have all of them there at once; they are in a frame."""
        if missing := [node for node in needs if node.evicted]:
            self.rebuild(missing)

    def rebuild(self, targets: list[Node]) -> None:
        """Compute evicted nodes again and, before them, whatever that reads and is gone, in room that is planned for.

        The scratch of operators is not known beforehand: where it was too much, the plan is made again with what was learnt.
        """
        began = _now()
        try:
            for _ in range(_ATTEMPTS):
                targets = [node for node in targets if not node.resident]
                plan = self._plan(targets)
                if self._rebuild_in_less(targets) if plan is None else self._follow(plan, self.room_bytes()):
                    return
            raise RebuildError(1)
        finally:
            if not self.plans:
                self.tally.rematerialize_ns += _now() - began

    def _plan(self, targets: list[Node]) -> Plan | None:
        """Everything that is gone once, and all that is there and read kept until then; ``None`` where there is no room."""
        ancestry = Ancestry(targets, self._scratch_of)
        plan = make_plan(ancestry.calls, targets, ancestry.there)
        if plan.peak_bytes <= self.free_bytes() or plan.peak_bytes <= self.room_bytes():
            return plan
        plan = make_plan(ancestry.in_program_order(), targets, ancestry.there)
        return plan if plan.peak_bytes <= self.room_bytes() else None

    def _rebuild_in_less(self, targets: list[Node]) -> bool:
        """From what cannot be computed again onwards, and some results more than once.

        ``targets`` grows: what waiting operators read may go in between as well.
        """
        waiting = () if self.plans else (node for frame in self.frames[self.running :] for node in frame)
        locks = {node: node.locks for node in waiting if node.record is not None and not node.pinned}
        targets += [node for node in locks if node.resident]
        for node in locks:
            node.locks = 0
        try:
            room_bytes = self.room_bytes()
            return self._follow(self._plan_for(targets, room_bytes), room_bytes)
        finally:
            for node, count in locks.items():
                node.locks += count

    def _plan_for(self, targets: list[Node], room_bytes: int) -> Plan:
        ancestry = Ancestry(targets, self._scratch_of, deep=True)
        calls = ancestry.in_program_order()
        plan = with_what_is_there(calls, targets, ancestry.there, room_bytes)
        if plan.peak_bytes > room_bytes >= sum(node.size_bytes for node in targets):
            order = self.orders.within(room_bytes, calls, targets)
            plan = with_what_is_there(order, targets, ancestry.there, room_bytes)
        if plan.peak_bytes > room_bytes:
            raise RebuildError(plan.peak_bytes - room_bytes)
        return plan

    def _follow(self, plan: Plan, room_bytes: int) -> bool:
        """Make the calls of the plan; false where one took more scratch than was known, which is known now."""
        live = dict.fromkeys(plan.given)
        for node in live:
            node.locks += 1
        self.plans.append(plan)
        step = None
        try:
            for step in plan.steps:
                self._take(step, live)
        except RuntimeError as error:
            if step is None or not _out_of_memory(error):
                raise
            refused_bytes = self.refused_bytes()
            if refused_bytes <= 0:
                raise
            self._learn(step.call.record, room_bytes - step.peak_bytes + refused_bytes)
            return False
        finally:
            self.plans.pop()
            for node in live:
                node.locks -= 1
            if self.banish and not self.plans:
                for step in plan.steps:
                    for node in step.makes:
                        self._release(node)
        return True

    def _take(self, step: Step, live: dict[Node, None]) -> None:
        frame = self._open((*step.makes, *step.makes[0].parents))
        for node in step.done:
            del live[node]
            node.locks -= 1
        try:
            self._complete(step.makes[0].parents)  # the program may have released one in the meantime
            if not all(node.resident for node in step.makes):
                self._compute(step.call.record, step.makes)
            for node in step.makes:
                live[node] = None
                node.locks += 1
        finally:
            self._close(frame)

    def _scratch_of(self, record: Record) -> int:
        return self.scratch_bytes.get(_kind(record), 0) if self.scratch_bytes else 0

    def _learn(self, record: Record, more_bytes: int) -> None:
        kind = _kind(record)
        self.scratch_bytes[kind] = self.scratch_bytes.get(kind, 0) + max(more_bytes, 1)

    def _compute(self, record: Record, wanted: Sequence[Node]) -> None:
        """Make the recorded call again; its results go where they were."""
        version = record.results.get(WRITTEN)
        own = {} if version is None else self._own_copies(record)
        args = [_thaw(value, own) for value in record.args]
        kwargs = {name: _thaw(value, own) for name, value in record.kwargs.items()}
        if record.operator.geometry_only and kwargs.get("device") is None:
            kwargs["device"] = record.args[0].device
        with torch.set_grad_enabled(record.grad), random_state.replayed(record.generator):
            result, cost_ns = self.execute(record.operator, args, kwargs)
        self.pool.tick(cost_ns)
        self.tally.rematerializations += 1
        if version is not None:
            (storage,) = own.values()
            self._place(version, storage)
            return
        tensors = list(tensors_of(result))
        for place, sibling in list(record.results.items()):
            if not sibling.resident and (sibling in wanted or sibling.alive()):
                self._place(sibling, storage_of(tensors[place]))

    def _own_copies(self, record: Record) -> dict[Node, UntypedStorage]:
        """For a call that writes: the old version, in a storage of its own that the call may change."""
        (old,) = {piece.node for piece in _pieces(_at(record.operator.writes, record.args, record.kwargs))}
        storage = old.storage()
        if storage is None:
            raise ExecutionError("the old version of a storage is not there")
        if old.kept is not None and old.handle is None and old.locks <= 1 and not old.pinned:
            self.pool.evict(old)
            self.spare.pop(old, None)
            old.kept = None
            return {old: storage}
        return {old: self._clone(storage)}

    def _place(self, node: Node, source: UntypedStorage) -> None:
        storage = node.handle() if node.handle is not None else None
        if source.nbytes() != node.size_bytes:
            raise ExecutionError(f"{source.nbytes()} bytes were computed again where there had been {node.size_bytes}")
        if storage is None:
            node.kept = source
            self.spare[node] = None
        else:
            fill(storage, source)
            if self.ignore:
                node.kept = storage
        self.pool.add(node)

    # --- the end of things -----------------------------------------------------------------------------------------

    def _bury(self) -> None:
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
            if self.recorder is not None and node.number in self.noted:
                self.recorder.release(node.number)
            if node.resident and node.record is not None and node.kept is None:
                self.pool.evict(node)
            self._release(node)

    def _release(self, node: Node) -> None:
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
        if self.plans or any(not child.resident for child in node.children):
            return False
        for child in list(node.children):
            self.keep(child)
        return not node.children

    # --- from outside ----------------------------------------------------------------------------------------------

    def touch(self, tensor: Tensor, access: Access) -> Callable[[], None] | None:
        """Make sure that the tensor's bytes are there; from ``EXPORT`` on, for as long as it lives.

        With ``SHARE`` they may change unseen, until what is returned is called: what was computed from them stays.
        """
        node = self._node_of(tensor)
        if node.evicted:
            self.rebuild([node])
        if access is Access.READ:
            return None
        node.exported = node.pinned = True
        if access is Access.EXPORT:
            return None
        self._lose(node)
        self.keep(node)
        node.writers += 1
        return node.end_writer

    def restore_all(self) -> None:
        """Rebuild whatever the program still holds."""
        self._bury()
        frame = self._open([node for node in self.nodes.values() if node.alive()])
        try:
            self._complete(frame)
        finally:
            self._close(frame)

    def recover(self) -> None:
        """No operator is under way any more: the last one failed or was interrupted, between any two steps of it."""
        self.frames.clear()
        self.plans.clear()
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
        self._bury()
        for node in known:
            self._release(node)

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

    def close(self) -> None:
        """Forget everything; all that is held must have been restored."""
        for node in self._known():
            node.record = node.kept = node.handle = None
            node.parents, node.children = (), {}
        self.nodes.clear()
        self.held.clear()
        self.spare.clear()
        self.dead.clear()
        self.frames.clear()
        self.plans.clear()


def _opaque() -> Node:
    node = Node(0)
    node.resident = node.pinned = node.opaque = True
    return node


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


def _at(positions: tuple[int | str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None for at in positions]


def _geometry(value: Any) -> Any:
    return Geometry(value) if isinstance(value, Tensor) else value


def _pieces(value: Any) -> Iterator[Piece]:
    if isinstance(value, Piece):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _pieces(item)


def _thaw(value: Any, own: dict[Node, UntypedStorage]) -> Any:
    if isinstance(value, Piece):
        storage = own[value.node] if value.node in own else value.node.storage()
        if storage is None:
            raise ExecutionError("an argument of a call that is made again is gone")
        return value.of(storage)
    if isinstance(value, Geometry):
        return value.blank()
    if isinstance(value, list):
        return [_thaw(item, own) for item in value]
    return value


def _kind(record: Record) -> Hashable:
    """Calls that take the same scratch."""
    return record.operator, *((piece.size, piece.dtype) for piece in _pieces([*record.args, *record.kwargs.values()]))


def _replace(record: Record, old: Node, new: Node) -> None:
    for piece in _pieces([*record.args, *record.kwargs.values()]):
        if piece.node is old:
            piece.node = new


def _dependents(node: Node) -> list[Node]:
    """What was computed from the node's contents: through what the program released, up to what it holds."""
    seen: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        for child in waiting.pop().children:
            if child not in seen:
                seen[child] = None
                if not child.alive():
                    waiting.append(child)
    return list(seen)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, RebuildError)) or "can't allocate memory" in str(error)

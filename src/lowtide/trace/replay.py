"""Replay a trace within a budget, event by event.

The rules are those of the simulator published with the paper (Kirisame et al., ICLR 2021, section 4):

- The cost of a storage is the cost of the operators of all its tensors, aliases included. It is computed from what
  these operators read.
- A read counts as an access when the operator is requested; a result when the operator has run. Missing arguments are
  rebuilt in order, while those present are locked.
- An operator runs once there is room for all its results, including those that are present: for a moment these exist
  twice.
- Of storages with equal scores, the one that became evictable last is evicted first.
- Constants and pinned tensors stay. A released constant still takes memory.

Policies for a storage whose last tensor the program has released:

    eager    evict it at once; it can be rebuilt if something else needs it
    ignore   do nothing; it may be chosen for eviction
    banish   remove it for good once nothing evicted was computed from it; what was computed from it then stays

Three things go beyond that simulator. Operators have workspaces. Some operators run once, and their results stay while
the program holds them. And there are writes: a write makes a new version, which the operator computes from the old one.
If the old version cannot be computed again (a constant, for example), the write happens in place. What could not be
rebuilt afterwards is rebuilt before the write, and stays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from lowtide.eviction import Pool
from lowtide.trace.model import Constant, Event, OperatorCall, Pin, Release
from lowtide.trace.storages import TracedOperator, TracedStorage, TracedTensor


class ReplayStatus(enum.Enum):
    """How a replay ended."""

    OK = "ok"
    OUT_OF_MEMORY = "OOM"
    THRASH = "thrash"


class ReplayEndError(Exception):
    """The replay cannot go on."""

    def __init__(self, status: ReplayStatus, operator: str) -> None:
        super().__init__(status.value)
        self.status = status
        self.operator = operator


class ReplayWatcher:
    """Is told about the events of a replay."""

    def ran(self, operator: TracedOperator, again: bool) -> None:
        """The operator has run; its results follow."""

    def came(self, storage: TracedStorage) -> None:
        """The storage takes memory from here on."""

    def went(self, storage: TracedStorage) -> None:
        """The storage takes no memory from here on."""


@dataclass(slots=True)
class Replay:
    """Runs the events one by one. ``spare_ns``: how much recomputation is allowed, ``None`` for no limit."""

    pool: Pool
    budget_bytes: int
    policy: str
    spare_ns: float | None
    watcher: ReplayWatcher
    tensors: dict[int, TracedTensor] = field(default_factory=dict)
    evictions: int = 0
    rematerializations: int = 0
    peak_bytes: int = 0
    turn: int = 0  # counts down: of equals, the one that became evictable last is evicted first

    def step(self, event: Event) -> None:
        """Run one event. Raises ``ReplayEndError`` if the replay cannot go on."""
        match event:
            case OperatorCall():
                self._call(event)
            case Constant():
                self._constant(event)
            case Release():
                self._release(self.tensors.pop(event.tensor))
            case Pin():
                self._define(self.tensors[event.tensor])
                self.tensors[event.tensor].storage.pinned = True

    def _constant(self, event: Constant) -> None:
        operator = TracedOperator("constant", 0, [])
        tensor = self.tensors[event.tensor] = operator.create(TracedStorage(event.bytes, outside=True), event.tensor)
        self._run(operator, tensor, again=False)
        tensor.storage.keep()

    def _call(self, call: OperatorCall) -> None:
        reads = [self.tensors[tensor] for tensor in call.reads]
        operator = TracedOperator(call.name, call.time_ns, reads, call.workspace_bytes)
        for created in call.creates:
            base = created.alias_of
            storage = TracedStorage(created.bytes) if base is None else self.tensors[base].storage
            self._attach(operator, storage)
            self.tensors[created.tensor] = operator.create(storage, created.tensor)
        versions = self._new_versions(call, operator)
        self._run(operator, operator.creates[0] if operator.creates else None, again=False)
        for tensor in operator.creates:
            self.pool.touch(tensor.storage)
            if call.once:
                tensor.storage.keep()
        for old, new in versions:
            self._move(old, new)

    def _attach(self, operator: TracedOperator, storage: TracedStorage) -> None:
        """The operator is about to create a tensor in the storage."""
        if all(tensor.operator is not operator for tensor in storage.tensors):
            self.pool.charge(storage, storage.cost_ns + operator.time_ns)
        self.pool.link(storage, (tensor.storage for tensor in operator.reads))

    def _new_versions(self, call: OperatorCall, operator: TracedOperator) -> list[tuple[TracedStorage, TracedTensor]]:
        """New versions of the storages that the call writes, if they can be computed again. The others are prepared for
        a write in place."""
        versions: list[tuple[TracedStorage, TracedTensor]] = []
        for number in call.writes:
            storage = self.tensors[number].storage
            if storage.lasting:
                self._cut_off(storage)
            elif storage not in [old for old, _ in versions]:
                fresh = TracedStorage(storage.bytes)
                self._attach(operator, fresh)
                versions.append((storage, operator.create(fresh, number)))
        return versions

    def _move(self, old: TracedStorage, new: TracedTensor) -> None:
        """Tensors in the old storage become tensors in the new version, whose first tensor is ``new``."""
        for tensor in [tensor for tensor in old.tensors if tensor.held]:
            moved = new
            if tensor.number != new.number:
                moved = TracedOperator("view", 0, [new]).create(new.storage, tensor.number)
                moved.defined = True
            self.tensors[tensor.number] = moved
            self._release(tensor)

    def _release(self, tensor: TracedTensor) -> None:
        storage = tensor.storage
        tensor.held = False
        storage.held -= 1
        if storage.held or storage.outside:
            return
        if self.policy == "banish":
            self._banish(storage)
        elif self.policy == "eager" and storage.resident:
            self._let_go(storage)

    def _let_go(self, storage: TracedStorage) -> None:
        """Evict the storage. If it cannot be computed again, forget it unless something held would need it."""
        if not storage.pinned:
            self._evict(storage)
        elif storage.lasting and all(held.resident for held in storage.dependents()[0]):
            self._cut_off(storage)
            self._forget(storage)

    def _banish(self, storage: TracedStorage) -> None:
        """Remove the storage for good, and also those it was computed from if they only waited for this one."""
        waiting = [storage]
        while waiting:
            here = waiting.pop()
            if here.held or here.outside or here.locks or not all(child.resident for child in here.children):
                continue
            waiting += here.parents
            for child in list(here.children):
                child.keep()
                self.pool.cut(child)
            self._forget(here)

    def _cut_off(self, storage: TracedStorage) -> None:
        """Make sure that nothing will be computed from the present contents of the storage any more."""
        held, unheld = storage.dependents()
        for here in held:
            if here.resident:
                here.keep()
        for here in held:
            while not here.resident:
                for tensor in here.tensors:
                    if tensor.held:
                        self._define(tensor)
            here.keep()
            self.pool.cut(here)
        for here in unheld:
            self._forget(here)

    def _forget(self, storage: TracedStorage) -> None:
        if storage.resident:
            self.watcher.went(storage)
        self.pool.forget(storage)

    def _define(self, tensor: TracedTensor) -> None:
        if not tensor.defined:
            self._run(tensor.operator, tensor, again=True)

    def _run(self, operator: TracedOperator, asked: TracedTensor | None, *, again: bool) -> None:
        """Run the operator, after the operators that make its missing arguments."""
        stack = [(operator, asked, self._ask(operator))]
        while stack:
            operator, asked, missing = stack[-1]
            if not missing:
                self._make_room(operator)
                self._compute(operator, asked, again=again or len(stack) > 1)
                stack.pop()
            elif missing[-1].defined:
                missing.pop().storage.locks += 1
            else:
                stack.append((missing[-1].operator, missing[-1], self._ask(missing[-1].operator)))

    def _ask(self, operator: TracedOperator) -> list[TracedTensor]:
        """Lock the arguments that are present; returns the missing ones, last first."""
        missing = []
        for tensor in operator.reads:
            self.pool.touch(tensor.storage)
            if tensor.defined:
                tensor.storage.locks += 1
            else:
                missing.append(tensor)
        return missing[::-1]

    def _make_room(self, operator: TracedOperator) -> None:
        while self.pool.bytes + operator.needed_bytes > self.budget_bytes:
            victim = self.pool.victim()
            if not isinstance(victim, TracedStorage):
                raise ReplayEndError(ReplayStatus.OUT_OF_MEMORY, operator.name)
            self.evictions += 1
            self._evict(victim)

    def _evict(self, storage: TracedStorage) -> None:
        self.watcher.went(storage)
        self.pool.evict(storage)
        for tensor in storage.tensors:
            tensor.defined = False

    def _compute(self, operator: TracedOperator, asked: TracedTensor | None, *, again: bool) -> None:
        pool = self.pool
        pool.tick(operator.time_ns)
        self.peak_bytes = max(self.peak_bytes, pool.bytes + operator.needed_bytes)
        self.watcher.ran(operator, again)
        for tensor in sorted(operator.creates, key=lambda tensor: tensor is asked):
            tensor.defined = True
            if not tensor.storage.resident:
                self._arrive(tensor.storage)
        for tensor in operator.reads:
            tensor.storage.locks -= 1
            if not tensor.storage.locks:
                self._evictable(tensor.storage)
        if self.policy == "banish":
            for tensor in operator.reads:
                self._banish(tensor.storage)
        if again:
            self.rematerializations += 1
            if self.spare_ns is not None:
                self.spare_ns -= operator.time_ns
                if self.spare_ns < 0:
                    raise ReplayEndError(ReplayStatus.THRASH, operator.name)

    def _arrive(self, storage: TracedStorage) -> None:
        """To become present again is no access."""
        accessed_ns = storage.accessed_ns
        self.watcher.came(storage)
        self.pool.enter(storage)
        storage.accessed_ns = accessed_ns
        self._evictable(storage)

    def _evictable(self, storage: TracedStorage) -> None:
        self.turn -= 1
        storage.arrived = self.turn

"""Replaying a trace within a budget, evicting by a heuristic, as an online run of the program would have to.

The rules are those of the simulator published with the paper (Kirisame et al., ICLR 2021, section 4):

- A storage costs what the operators of its tensors cost together, aliases included; it is computed from what they read.
- What an operator reads counts as accessed when the operator is asked for, what the program has just computed when it has
  run. What is missing is rebuilt in the order of the arguments, while those that are there are locked.
- An operator runs when its results fit, those among them that are there already included: they exist twice for a moment.
- Among storages of equal score the one goes first that could be evicted last.
- Constants and pinned tensors stay; a released constant still takes up memory.

Policies, for a storage whose last tensor the program has released:

    eager    evict it at once; it can be rebuilt where something else needs it
    ignore   do nothing: it goes when it is chosen
    banish   let it go for good as soon as nothing evicted was computed from it; what was computed from it stays from then on

Beyond that simulator: workspaces; operators that run once, whose results stay while they are held; and writes. A
write leaves a new version, computed by the operator from the old one; where the old one cannot be computed again (a
constant, say), it happens in place, and whatever can no longer be rebuilt afterwards is rebuilt before and stays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from lowtide.errors import LowtideError
from lowtide.eviction import Entry, Pool
from lowtide.trace.checker import check_trace
from lowtide.trace.model import Call, Constant, Event, Pin, Release, Trace
from lowtide.trace.program import Operator, Storage, Tensor

POLICIES = ("eager", "ignore", "banish")


class Status(enum.Enum):
    OK = "ok"
    OUT_OF_MEMORY = "OOM"
    THRASH = "thrash"


@dataclass(frozen=True, slots=True)
class Result:
    """``base_ns``: every operator once; ``time_ns``: up to where the replay ended. ``operator`` is where it failed.

    ``evictions`` counts those that made room; ``rematerializations`` the operators that ran again.
    """

    status: Status
    budget_bytes: int
    peak_bytes: int
    base_ns: int
    time_ns: int
    evictions: int
    rematerializations: int
    operator: str = ""

    @property
    def slowdown(self) -> float:
        return self.time_ns / self.base_ns if self.base_ns else 1.0


def simulate(
    trace: Trace,
    budget_bytes: int,
    heuristic: str = "dtr-eq",
    *,
    policy: str = "eager",
    sample: bool = False,
    skip_small: bool = False,
    seed: int = 0,
    most_slowdown: float | None = 2.0,
    watcher: Watcher | None = None,
) -> Result:
    """Replay the trace. It ends where nothing can make room, and where it would take over ``most_slowdown`` of its time.

    ``watcher`` is told what runs, and what comes and goes.

    Raises ``LowtideError`` for an unknown heuristic or policy and for a trace that contradicts itself.
    """
    if policy not in POLICIES:
        raise LowtideError(f"no policy is named {policy!r}; known: {', '.join(POLICIES)}")
    check_trace(trace)
    pool = Pool(heuristic=heuristic, sample=sample, skip_small=skip_small, seed=seed)
    replay = _Replay(pool, budget_bytes, policy, most_slowdown, trace.time_ns, watcher)
    status, operator = Status.OK, ""
    try:
        for event in trace.events:
            replay.step(event)
    except _EndError as end:
        status, operator = end.status, end.operator
    return Result(
        status,
        budget_bytes,
        replay.peak_bytes,
        trace.time_ns,
        pool.clock_ns,
        replay.evictions,
        replay.rematerializations,
        operator,
    )


class Watcher(Protocol):
    """Sees a replay go by."""

    def ran(self, operator: Operator, again: bool) -> None:
        """The operator has run; what it leaves is about to come."""

    def came(self, storage: Storage) -> None:
        """The storage takes up memory from here on."""

    def went(self, storage: Storage) -> None:
        """It no longer does."""


class _EndError(Exception):
    """The replay cannot go on."""

    def __init__(self, status: Status, operator: str) -> None:
        super().__init__(status.value)
        self.status = status
        self.operator = operator


class _Replay:
    def __init__(
        self,
        pool: Pool,
        budget_bytes: int,
        policy: str,
        most_slowdown: float | None,
        base_ns: int,
        watcher: Watcher | None = None,
    ) -> None:
        self.pool = pool
        self.budget_bytes = budget_bytes
        self.policy = policy
        self.watcher = watcher
        self.spare_ns = None if most_slowdown is None else (most_slowdown - 1) * base_ns
        self.tensors: dict[int, Tensor] = {}
        self.evictions = self.rematerializations = self.peak_bytes = 0
        self.turn = 0  # counts down: of equals, the one that became evictable last goes first

    def step(self, event: Event) -> None:
        match event:
            case Call():
                self._call(event)
            case Constant():
                self._constant(event)
            case Release():
                self._release(self.tensors.pop(event.tensor))
            case Pin():
                self._pin(self.tensors[event.tensor])

    def _constant(self, event: Constant) -> None:
        operator = Operator("constant", 0, [])
        tensor = self.tensors[event.tensor] = operator.create(Storage(event.bytes, outside=True), event.tensor)
        self._run(operator, tensor, again=False)
        tensor.storage.keep()

    def _call(self, call: Call) -> None:
        reads = [self.tensors[tensor] for tensor in call.reads]
        operator = Operator.of(call, reads)
        for created in call.creates:
            base = created.alias_of
            storage = Storage(created.bytes) if base is None else self.tensors[base].storage
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

    def _attach(self, operator: Operator, storage: Storage) -> None:
        """The operator is about to create a tensor in the storage."""
        if all(tensor.operator is not operator for tensor in storage.tensors):
            self.pool.charge(storage, storage.cost_ns + operator.time_ns)
        self.pool.link(storage, (tensor.storage for tensor in operator.reads))

    def _new_versions(self, call: Call, operator: Operator) -> list[tuple[Storage, Tensor]]:
        """Of the storages that the call writes and that can be computed again; the others are made ready for it."""
        versions: list[tuple[Storage, Tensor]] = []
        for number in call.writes:
            storage = self.tensors[number].storage
            if storage.lasting:
                self._cut_off(storage)
            elif storage not in [old for old, _ in versions]:
                fresh = Storage(storage.bytes)
                self._attach(operator, fresh)
                versions.append((storage, operator.create(fresh, number)))
        return versions

    def _move(self, old: Storage, new: Tensor) -> None:
        """Whoever looked at the old storage looks at the new version, whose first tensor is ``new``."""
        for tensor in [tensor for tensor in old.tensors if tensor.held]:
            moved = new
            if tensor.number != new.number:
                moved = Operator("view", 0, [new]).create(new.storage, tensor.number)
                moved.defined = True
            self.tensors[tensor.number] = moved
            self._release(tensor)

    def _release(self, tensor: Tensor) -> None:
        storage = tensor.storage
        tensor.held = False
        storage.held -= 1
        if storage.held or storage.outside:
            return
        if self.policy == "banish":
            self._banish(storage)
        elif self.policy == "eager" and storage.resident:
            self._let_go(storage)

    def _let_go(self, storage: Storage) -> None:
        """Evict it; what can not be computed again is forgotten, unless something held would need it."""
        if not storage.pinned:
            self._evict(storage)
        elif storage.lasting and all(held.resident for held in _dependents(storage)[0]):
            self._cut_off(storage)
            self._forget(storage)

    def _banish(self, storage: Storage) -> None:
        """The storage and, where that was all they waited for, those from which it was computed."""
        waiting = [storage]
        while waiting:
            here = waiting.pop()
            if here.held or here.outside or here.locks or not all(child.resident for child in here.children):
                continue
            waiting += _storages(here.parents)
            for child in _storages(here.children):
                child.keep()
                self.pool.cut(child)
            self._forget(here)

    def _cut_off(self, storage: Storage) -> None:
        """Nothing will be computed from what the storage holds now any more."""
        held, unheld = _dependents(storage)
        for here in held:
            if here.resident:
                here.keep()
        for here in held:
            while not here.resident:
                self._rebuild(here)
            here.keep()
            self.pool.cut(here)
        for here in unheld:
            self._forget(here)

    def _forget(self, storage: Storage) -> None:
        if self.watcher is not None and storage.resident:
            self.watcher.went(storage)
        self.pool.forget(storage)

    def _rebuild(self, storage: Storage) -> None:
        for tensor in storage.tensors:
            if tensor.held and not tensor.defined:
                self._run(tensor.operator, tensor, again=True)

    def _pin(self, tensor: Tensor) -> None:
        if not tensor.defined:
            self._run(tensor.operator, tensor, again=True)
        tensor.storage.pinned = True

    def _run(self, operator: Operator, asked: Tensor | None, *, again: bool) -> None:
        """Run the operator and, before it, those of whatever it reads that is gone."""
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

    def _ask(self, operator: Operator) -> list[Tensor]:
        """Lock what is there; returns what is not, the first last."""
        missing = []
        for tensor in operator.reads:
            self.pool.touch(tensor.storage)
            if tensor.defined:
                tensor.storage.locks += 1
            else:
                missing.append(tensor)
        return missing[::-1]

    def _make_room(self, operator: Operator) -> None:
        while self.pool.bytes + operator.needed_bytes > self.budget_bytes:
            victim = self.pool.victim()
            if not isinstance(victim, Storage):
                raise _EndError(Status.OUT_OF_MEMORY, operator.name)
            self.evictions += 1
            self._evict(victim)

    def _evict(self, storage: Storage) -> None:
        if self.watcher is not None:
            self.watcher.went(storage)
        self.pool.evict(storage)
        for tensor in storage.tensors:
            tensor.defined = False

    def _compute(self, operator: Operator, asked: Tensor | None, *, again: bool) -> None:
        pool = self.pool
        pool.tick(operator.time_ns)
        self.peak_bytes = max(self.peak_bytes, pool.bytes + operator.needed_bytes)
        if self.watcher is not None:
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
            self._spend(operator)

    def _arrive(self, storage: Storage) -> None:
        """Coming back is no access."""
        accessed_ns = storage.accessed_ns
        if self.watcher is not None:
            self.watcher.came(storage)
        if storage.evicted:
            self.pool.add(storage)
        else:
            self.pool.enter(storage)
        storage.accessed_ns = accessed_ns
        self._evictable(storage)

    def _evictable(self, storage: Storage) -> None:
        self.turn -= 1
        storage.arrived = self.turn

    def _spend(self, operator: Operator) -> None:
        if self.spare_ns is not None:
            self.spare_ns -= operator.time_ns
            if self.spare_ns < 0:
                raise _EndError(Status.THRASH, operator.name)


def _dependents(storage: Storage) -> tuple[list[Storage], list[Storage]]:
    """What was computed from the storage, directly or by way of what nobody holds: the held ones, and those between."""
    held: dict[Storage, None] = {}
    unheld: dict[Storage, None] = {}
    waiting = [storage]
    while waiting:
        for child in _storages(waiting.pop().children):
            if not (child.resident or child.evicted) or child in held or child in unheld:
                continue
            (held if child.held else unheld)[child] = None
            if not child.held:
                waiting.append(child)
    return list(held), list(unheld)


def _storages(entries: tuple[Entry, ...] | dict[Entry, None]) -> list[Storage]:
    return [entry for entry in entries if isinstance(entry, Storage)]

"""Check that a schedule is valid. Independent of byte counts and of the simulator.

A valid schedule reads only live inputs, frees only live storages, and has its outputs live at the boundary and at the end.
Recomputed random ops run under the generator state of their first run, effects run once and in order, and no parameter is
read after its optimizer has updated it. First computes keep the program's order, with two exceptions: views, which cost
nothing, and collectives that depend on no operator of the program (``may_run_early``), which may run earlier in the order of
collectives. A storage is offloaded once, while it is live, and fetched only after it was freed.
"""

from __future__ import annotations

import itertools
from typing import NoReturn

from lowtide.errors import ScheduleError
from lowtide.ir.graph import OPTIMIZER_TARGET, TANGENT_TARGET, Graph, Op, Phase, Storage
from lowtide.ir.schedule import Compute, Fetch, Free, Offload, RestoreRng, SaveRng, Schedule
from lowtide.ir.sequence import may_run_early, shared_storages


def check(graph: Graph, schedule: Schedule) -> None:
    """Raise ``ScheduleError`` naming the step and the op if ``schedule`` is not valid for ``graph``."""
    _Checker(graph, schedule).run()


class _Checker:
    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule
        self.index = 0
        self.storage_of = [value.storage for value in graph.values]
        self.values = {value.id for value in graph.values if value.producer is None}
        self.storages = {storage.id for storage in graph.storages if storage.external}
        self.computed: set[int] = set()
        self.latest = self.latest_collective = -1
        self.saved: set[int] = set()
        self.replayed: set[int] = set()
        self.due: Op | None = None  # the op that must run next: its generator state is set
        self.handed: set[int] = set()  # storages handed to the caller at the boundary
        self.fixed = shared_storages(graph) if schedule.moves else set()  # storages that cannot move
        self.copied: set[int] = set()  # storages that were offloaded
        self.updated: set[int] = set()  # storages of parameters that their optimizer has updated

    def run(self) -> None:
        steps = self.schedule.steps
        if not 0 <= self.schedule.boundary <= len(steps):
            self._fail(f"boundary {self.schedule.boundary} lies outside the {len(steps)} steps")
        for self.index, step in enumerate(steps):
            at_boundary = self.index == self.schedule.boundary
            if self.due and (at_boundary or not isinstance(step, Compute) or step.op != self.due.id):
                self._fail(f"the generator state of {self.due.name} is not followed by its compute")
            if at_boundary:
                self._hand_over()
            match step:
                case Compute(op, into):
                    if into is not None:
                        self._check_into(self._op(op), into)
                    self._compute(self._op(op))
                case Free(storage):
                    self._free(storage)
                case SaveRng(op):
                    self._save(self._op(op))
                case RestoreRng(op):
                    self._restore(self._op(op))
                case Offload(storage):
                    self._offload(storage)
                case Fetch(storage):
                    self._fetch(storage)
        self.index = len(steps)
        if self.due:
            self._fail(f"the schedule ends between the generator state of {self.due.name} and its compute")
        if self.schedule.boundary == len(steps):
            self._hand_over()
        self._finish()

    def _compute(self, op: Op) -> None:
        backward = self.index >= self.schedule.boundary
        if not backward and op.phase is Phase.BACKWARD:
            self._fail(f"backward op {op.name} runs in the forward program")
        again, own = op.id in self.computed, self._allocated_by(op)
        if again and not op.recomputable:
            self._fail(f"{op.name} must run exactly once")
        if not again and not self.graph.views[op.id]:  # views cost nothing and may run anywhere
            self._first(op)
            if backward and op.phase is Phase.FORWARD:
                self._fail(f"forward op {op.name} first runs in the backward program")
        for value in op.inputs:
            if value not in self.values:
                gone = "updated already" if self.storage_of[value] in self.updated else "not live"
                self._fail(f"{op.name} reads {self.graph.values[value].name}, which is {gone}")
        if op.random and again and self.due is not op:
            self._fail(f"random op {op.name} is recomputed without its generator state")
        self.due = None
        self.computed.add(op.id)
        kept = own & self.storages
        self.storages |= own
        for value in op.outputs:
            if self.storage_of[value] not in self.storages:
                self._fail(f"{op.name} forms a view of a storage that is not live")
            if self.storage_of[value] not in kept:
                self.values.add(value)
        if op.target == OPTIMIZER_TARGET:
            parameter = self.storage_of[op.inputs[0]]
            self.updated.add(parameter)
            self.values.difference_update(self.graph.storages[parameter].values)

    def _first(self, op: Op) -> None:
        """Fail if the first run of ``op`` breaks the program's order. Collectives and effects also keep their order: the data
        that a collective gets from other ranks may depend on effects before it."""
        changes = op.effect and op.target not in (TANGENT_TARGET, OPTIMIZER_TARGET)
        latest = max(self.latest, self.latest_collective) if op.collective or changes else self.latest
        if op.id < latest:
            later = self.graph.ops[latest].name
            self._fail(f"{op.name} first runs after {later}, which comes later in the program")
        if op.collective:
            self.latest_collective = op.id
        if not may_run_early(self.graph, op):
            self.latest = op.id

    def _check_into(self, op: Op, into: int) -> None:
        """Fail unless ``op`` may overwrite ``into``, allocates exactly one storage, and ``into`` is freed right after it."""
        name = f"{op.name} is to write into storage {into}"
        if into not in self.graph.storages_of(op.overwrites):
            self._fail(f"{name}, which it must not")
        own = self._allocated_by(op)
        if len(own) != 1 or own & self.storages:
            self._fail(f"{name}, but has not just one new storage")
        following = self.schedule.steps[self.index + 1 :]
        if Free(into) not in itertools.takewhile(lambda step: isinstance(step, Free), following):
            self._fail(f"{name}, which is not freed next")

    def _allocated_by(self, op: Op) -> set[int]:
        return {storage for storage in self.graph.made[op.id] if self.graph.storages[storage].base == op.id}

    def _named(self, storage_id: int) -> tuple[Storage, str]:
        """The storage, and the name of its first value."""
        if not 0 <= storage_id < len(self.graph.storages):
            self._fail(f"there is no storage {storage_id}")
        storage = self.graph.storages[storage_id]
        return storage, self.graph.values[storage.values[0]].name if storage.values else str(storage_id)

    def _free(self, storage_id: int) -> None:
        storage, name = self._named(storage_id)
        if storage.external:
            self._fail(f"the storage of {name} is not the program's to free")
        if storage_id not in self.storages:
            self._fail(f"the storage of {name} is freed but not live")
        if storage_id in self.handed:
            self._fail(f"the storage of {name} belongs to the caller and cannot be freed")
        self.storages.discard(storage_id)
        self.values.difference_update(storage.values)

    def _offload(self, storage_id: int) -> None:
        storage, name = self._named(storage_id)
        if storage.external or storage_id in self.handed:
            self._fail(f"the storage of {name} is not the program's to move")
        if storage_id in self.fixed:
            self._fail(f"the storage of {name} gets values from several operators and cannot move")
        if storage_id not in self.storages:
            self._fail(f"the storage of {name} is to be offloaded but not live")
        if storage_id in self.copied:
            self._fail(f"the storage of {name} was offloaded before")
        self.copied.add(storage_id)

    def _fetch(self, storage_id: int) -> None:
        storage, name = self._named(storage_id)
        if storage_id not in self.copied:
            self._fail(f"the storage of {name} is to be fetched but was not offloaded")
        if storage_id in self.storages:
            self._fail(f"the storage of {name} is to be fetched but still live")
        self.storages.add(storage_id)
        self.values.update(value for value in storage.values if self.graph.values[value].producer == storage.base)

    def _save(self, op: Op) -> None:
        if not op.random or op.id in self.computed or op.id in self.saved:
            self._fail(f"the generator state of {op.name} can only be saved once, before a random op first runs")
        self.saved.add(op.id)
        self.due = op

    def _restore(self, op: Op) -> None:
        if op.id not in self.saved or op.id not in self.computed:
            self._fail(f"the generator state of {op.name} was not saved")
        self.replayed.add(op.id)
        self.due = op

    def _hand_over(self) -> None:
        for value in self.graph.forward_outputs:
            if value not in self.values:
                self._fail(f"forward output {self.graph.values[value].name} is not live at the boundary")
            if not self.graph.storages[self.storage_of[value]].external:
                self.handed.add(self.storage_of[value])

    def _finish(self) -> None:
        for value in self.graph.outputs:
            if value not in self.values:
                self._fail(f"output {self.graph.values[value].name} is not live at the end")
        for op in self.graph.ops:
            if op.effect and op.id not in self.computed:
                self._fail(f"effect {op.name} never runs")
        fetched = {step.storage for step in self.schedule.steps if isinstance(step, Fetch)}
        if useless := self.copied - fetched:
            self._fail(f"the storage of {self._named(min(useless))[1]} is offloaded and never fetched")
        if unused := self.saved - self.replayed:
            name = self.graph.ops[min(unused)].name
            self._fail(f"the generator state of {name} is saved and never restored")

    def _op(self, op_id: int) -> Op:
        if not 0 <= op_id < len(self.graph.ops):
            self._fail(f"there is no op {op_id}")
        return self.graph.ops[op_id]

    def _fail(self, reason: str) -> NoReturn:
        raise ScheduleError(f"step {self.index}: {reason}")

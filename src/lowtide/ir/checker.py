"""Validity of a schedule, independent of bytes and of the simulator.

Every input is live when read, nothing is freed twice or while it is not live, outputs are there when they are due, random
ops are replayed under their first state, effects run once and in order, and first computes keep the program's order
(views, which cost nothing, excepted).
"""

from __future__ import annotations

import itertools
from typing import NoReturn

from lowtide.errors import ScheduleError
from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule


def check(graph: Graph, schedule: Schedule) -> None:
    """Raise ``ScheduleError`` naming the step and the op if ``schedule`` is not valid for ``graph``."""
    _Checker(graph, schedule).run()


class _Checker:
    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule
        self.index = 0
        self.values = {value.id for value in graph.values if value.producer is None}
        self.storages = {storage.id for storage in graph.storages if storage.external}
        self.computed: set[int] = set()
        self.latest = -1
        self.saved: set[int] = set()
        self.replayed: set[int] = set()
        self.due: int | None = None  # the op whose compute must come next
        self.handed: set[int] = set()

    def run(self) -> None:
        steps = self.schedule.steps
        if not 0 <= self.schedule.boundary <= len(steps):
            self._fail(f"boundary {self.schedule.boundary} lies outside the {len(steps)} steps")
        for self.index, step in enumerate(steps):
            follows = isinstance(step, Compute) and step.op == self.due and self.index != self.schedule.boundary
            if self.due is not None and not follows:
                self._fail(f"the generator state of {self._name(self.due)} is not followed by its compute")
            if self.index == self.schedule.boundary:
                self._hand_over()
            if isinstance(step, Compute):
                if step.into is not None:
                    self._check_into(step.op, step.into)
                self._compute(step.op)
            elif isinstance(step, Free):
                self._free(step.storage)
            elif isinstance(step, SaveRng):
                self._save(step.op)
            elif isinstance(step, RestoreRng):
                self._restore(step.op)
        self.index = len(steps)
        if self.due is not None:
            self._fail(f"the schedule ends between the generator state of {self._name(self.due)} and its compute")
        if self.schedule.boundary == len(steps):
            self._hand_over()
        self._finish()

    def _compute(self, op_id: int) -> None:
        op = self._op(op_id)
        if self.index < self.schedule.boundary and op.phase is Phase.BACKWARD:
            self._fail(f"backward op {op.name} runs in the forward program")
        again = op_id in self.computed
        if again and not op.recomputable:
            self._fail(f"{op.name} must run exactly once")
        if not again and not self._only_views(op_id):
            if op_id < self.latest:
                self._fail(f"{op.name} first runs after {self._name(self.latest)}, which comes later in the program")
            if self.index >= self.schedule.boundary and op.phase is Phase.FORWARD:
                self._fail(f"forward op {op.name} first runs in the backward program")
            self.latest = op_id
        for value in op.inputs:
            if value not in self.values:
                self._fail(f"{op.name} reads {self.graph.values[value].name}, which is not live")
        if op.random and again and self.due != op_id:
            self._fail(f"random op {op.name} is recomputed without its generator state")
        self.due = None
        self.computed.add(op_id)
        self._allocate(op_id)

    def _check_into(self, op_id: int, into: int) -> None:
        """The op may overwrite ``into``, has one new storage, and ``into`` is freed before anything else runs."""
        op = self._op(op_id)
        name = f"{op.name} is to write into storage {into}"
        if into not in {self.graph.values[value].storage for value in op.overwrites}:
            self._fail(f"{name}, which it must not")
        own = self._allocated_by(op_id)
        if len(own) != 1 or own & self.storages:
            self._fail(f"{name}, but has not just one new storage")
        following = self.schedule.steps[self.index + 1 :]
        if Free(into) not in itertools.takewhile(lambda step: isinstance(step, Free), following):
            self._fail(f"{name}, which is not freed next")

    def _only_views(self, op_id: int) -> bool:
        """View ops are pure and free, so they may first run anywhere."""
        op = self.graph.ops[op_id]
        return bool(op.outputs) and not self._allocated_by(op_id) and op.recomputable and not op.random

    def _allocated_by(self, op_id: int) -> set[int]:
        storages = {self.graph.values[value].storage for value in self.graph.ops[op_id].outputs}
        return {storage for storage in storages if self.graph.storages[storage].base == op_id}

    def _allocate(self, op_id: int) -> None:
        own = self._allocated_by(op_id)
        kept = own & self.storages
        self.storages |= own
        for value in self.graph.ops[op_id].outputs:
            storage = self.graph.values[value].storage
            if storage not in self.storages:
                self._fail(f"{self._name(op_id)} forms a view of a storage that is not live")
            if storage not in kept or value in self.values:
                self.values.add(value)

    def _free(self, storage_id: int) -> None:
        if not 0 <= storage_id < len(self.graph.storages):
            self._fail(f"there is no storage {storage_id}")
        storage = self.graph.storages[storage_id]
        name = self.graph.values[storage.values[0]].name if storage.values else str(storage_id)
        if storage.external:
            self._fail(f"the storage of {name} is not the program's to free")
        if storage_id not in self.storages:
            self._fail(f"the storage of {name} is freed but not live")
        if storage_id in self.handed:
            self._fail(f"the storage of {name} belongs to the caller and cannot be freed")
        self.storages.discard(storage_id)
        self.values.difference_update(storage.values)

    def _save(self, op_id: int) -> None:
        op = self._op(op_id)
        if not op.random or op_id in self.computed or op_id in self.saved:
            self._fail(f"the generator state of {op.name} can only be saved once, before a random op first runs")
        self.saved.add(op_id)
        self.due = op_id

    def _restore(self, op_id: int) -> None:
        op = self._op(op_id)
        if op_id not in self.saved or op_id not in self.computed:
            self._fail(f"the generator state of {op.name} was not saved")
        self.replayed.add(op_id)
        self.due = op_id

    def _hand_over(self) -> None:
        for value in self.graph.forward_outputs:
            if value not in self.values:
                self._fail(f"forward output {self.graph.values[value].name} is not live at the boundary")
            storage = self.graph.values[value].storage
            if not self.graph.storages[storage].external:
                self.handed.add(storage)

    def _finish(self) -> None:
        for value in self.graph.outputs:
            if value not in self.values:
                self._fail(f"output {self.graph.values[value].name} is not live at the end")
        missing = next((op for op in self.graph.ops if op.effect and op.id not in self.computed), None)
        if missing is not None:
            self._fail(f"effect {missing.name} never runs")
        unused = self.saved - self.replayed
        if unused:
            self._fail(f"the generator state of {self._name(min(unused))} is saved and never restored")

    def _op(self, op_id: int) -> Op:
        if not 0 <= op_id < len(self.graph.ops):
            self._fail(f"there is no op {op_id}")
        return self.graph.ops[op_id]

    def _name(self, op_id: int) -> str:
        return self.graph.ops[op_id].name

    def _fail(self, reason: str) -> NoReturn:
        raise ScheduleError(f"step {self.index}: {reason}")

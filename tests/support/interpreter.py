"""A third reading of schedules, apart from simulator and checker: run them on real memory.

Every storage is a ``bytearray`` and every value a digest of what it was computed from, so that residency is what is really
allocated and a wrong recomputation is a wrong digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from lowtide.ir import Compute, Costs, Fetch, Free, Graph, Offload, RestoreRng, SaveRng, Schedule


@dataclass
class Machine:
    """Memory, values and a random generator (a counter). ``timeline[i]``: bytes allocated at the height of step i."""

    graph: Graph
    costs: Costs
    storages: dict[int, bytearray] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)
    states: dict[int, tuple[int, bytearray]] = field(default_factory=dict)
    copies: dict[int, dict[int, str]] = field(default_factory=dict)  # storage -> its values in the second memory
    overwritten: set[int] = field(default_factory=set)
    generator: int = 0
    effects: list[int] = field(default_factory=list)
    timeline: list[int] = field(default_factory=list)
    handed_over: dict[int, str] = field(default_factory=dict)

    def run(self, schedule: Schedule) -> Machine:
        for value in self.graph.values:
            if value.producer is None:
                self.values[value.id] = f"input {value.id}"
        last = {step.op: i for i, step in enumerate(schedule.steps) if isinstance(step, Compute)}
        restored: int | None = None
        for index, step in enumerate(schedule.steps):
            if index == schedule.boundary:
                self._hand_over()
            self.timeline.append(self._allocated())
            if isinstance(step, Compute):
                self._compute(step.op, restored, step.into)
                restored = None
                if last[step.op] == index:
                    self.states.pop(step.op, None)
            elif isinstance(step, Free):
                if step.storage in self.overwritten:
                    self.overwritten.discard(step.storage)
                else:
                    del self.storages[step.storage]
                for value in self.graph.storages[step.storage].values:
                    self.values.pop(value, None)
            elif isinstance(step, SaveRng):
                self.states[step.op] = (self.generator, bytearray(self.costs.rng_state_bytes))
                self.timeline[-1] = self._allocated()
            elif isinstance(step, Offload):
                own = self.graph.storages[step.storage]
                made = {value for value in own.values if self.graph.values[value].producer == own.base}
                self.copies[step.storage] = {value: self.values[value] for value in made}
            elif isinstance(step, Fetch):
                assert step.storage not in self.storages
                self.storages[step.storage] = bytearray(int(self.costs.storage_bytes[step.storage]))
                self.values.update(self.copies[step.storage])
                self.timeline[-1] = self._allocated()
            elif isinstance(step, RestoreRng):
                restored = self.states[step.op][0]
        if schedule.boundary == len(schedule.steps):
            self._hand_over()
        return self

    def _hand_over(self) -> None:
        self.handed_over = {value: self.values[value] for value in self.graph.forward_outputs}

    def _allocated(self) -> int:
        states = sum(len(memory) for _, memory in self.states.values())
        return self.graph.fixed_bytes + sum(map(len, self.storages.values())) + states

    def _compute(self, op_id: int, restored: int | None, into: int | None) -> None:
        op = self.graph.ops[op_id]
        drawn = ""
        if op.random:
            drawn = f"random {self.generator if restored is None else restored}"
            self.generator += restored is None
        if op.effect:
            self.effects.append(op_id)
        read = "|".join(self.values[value] for value in op.inputs)
        own = {v: self.graph.values[v].storage for v in op.outputs}
        if into is not None:
            del self.storages[into]
            self.overwritten.add(into)
        fresh = {s: bytearray(int(self.costs.storage_bytes[s])) for s in own.values() if self._is_base(s, op_id)}
        workspace = bytearray(int(self.costs.workspace_bytes[op_id]))
        self.timeline[-1] = self._allocated() + sum(map(len, fresh.values())) + len(workspace)
        for storage, memory in fresh.items():
            self.storages.setdefault(storage, memory)
        for value in op.outputs:
            digest = hashlib.sha256(f"{op_id}.{value}({read}){drawn}".encode()).hexdigest()
            assert self.values.setdefault(value, digest) == digest, f"{op.name} computed something else the second time"

    def _is_base(self, storage: int, op_id: int) -> bool:
        return self.graph.storages[storage].base == op_id

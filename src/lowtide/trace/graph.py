"""A trace as a graph for planners, so that they can be compared with online runs of the same program.

As a ``lowtide-graph/1`` object it has several results per operator, views and flags. A tensor is a value, constants are graph
inputs in external storages and count as ``fixed_bytes``. An operator whose results nobody reads (a mere view is left out),
one that runs once, and a write to what cannot be computed again have the flag ``effect``: planners run them once. A write is
an operator that returns the new version, at which all aliases look from then on. A storage is freed with its last use, not
with its release; what is pinned or held at the end is an output.

As a ``lowtide-dag/1`` object it has one result per operator, as large as all of them and freed together. An operator that
only makes aliases is left out with its time: an alias is the operator whose storage it shares. A write to what cannot be
computed again is an operator without bytes on which later readers depend. That an operator must not run twice cannot be said.
"""

from __future__ import annotations

from typing import Any

from lowtide.ir.fields import DAG_FORMAT, GRAPH_FORMAT
from lowtide.trace.model import Constant, OperatorCall, Pin, Release, Trace


def trace_to_graph(trace: Trace) -> dict[str, Any]:
    """The ``lowtide-graph/1`` object."""
    return _Conversion(trace, views_last=True).graph()


def trace_to_dag(trace: Trace) -> dict[str, Any]:
    """The ``lowtide-dag/1`` object."""
    return _Conversion(trace, views_last=False).dag()


class _Conversion:
    def __init__(self, trace: Trace, *, views_last: bool) -> None:
        self.trace = trace
        self.views_last = views_last  # whether a storage is lasting once a call that runs once has made an alias of it
        self.ops: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.value_of: dict[int, int] = {}  # live tensor -> its value
        self.lasting: dict[int, list[int]] = {}  # storage that cannot be computed again -> the ops that write it
        self.versions: dict[int, int] = {}  # storage that was written -> that of the new version
        self.kept: dict[int, None] = {}
        for event in trace.events:
            match event:
                case Constant():
                    self.lasting[len(self.storages)] = []
                    self._value(event.tensor, None, self._storage(None, event.bytes))
                case OperatorCall():
                    self._call(event)
                case Release():
                    del self.value_of[event.tensor]
                case Pin():
                    self.kept[self.value_of[event.tensor]] = None
        self.kept |= dict.fromkeys(self.value_of.values())
        self.fixed_bytes = sum(storage["bytes"] for storage in self.storages if storage["base"] is None)
        self.forward_ops = len(self.ops) if trace.forward_calls is None else trace.forward_calls

    def graph(self) -> dict[str, Any]:
        self._mark_effects()
        return {
            "format": GRAPH_FORMAT,
            "name": self.trace.name,
            "fixed_bytes": self.fixed_bytes,
            "forward_ops": self.forward_ops,
            "device": self.trace.device,
            "rng_state_bytes": 0,
            "inputs": [index for index, value in enumerate(self.values) if value["producer"] is None],
            "forward_outputs": [],
            "outputs": [value for value in self.kept if self.values[value]["producer"] is not None],
            "storages": self.storages,
            "values": self.values,
            "ops": self.ops,
        }

    def dag(self) -> dict[str, Any]:
        sizes = [0] * len(self.ops)
        makers = {op for writers in self.lasting.values() for op in writers}
        for storage in self.storages:
            if storage["base"] is not None:
                makers.add(storage["base"])
                sizes[storage["base"]] += storage["bytes"]
        number: dict[int, int] = {}
        ops: list[dict[str, Any]] = []
        for index, op in enumerate(self.ops):
            if index in makers or not op["outputs"]:
                read = {self.values[value]["storage"] for value in op["inputs"]}
                inputs = sorted(number[made] for made in self._made_by(read) if made < index)
                number[index] = len(ops)
                name = f"{op['target']}_{len(ops)}"
                numbers = {"bytes": sizes[index], "workspace_bytes": op["workspace_bytes"], "inputs": inputs}
                ops.append({"name": name, "time_ns": op["time_ns"], **numbers})
        kept = {self._latest(self.values[value]["storage"]) for value in self.kept}
        return {
            "format": DAG_FORMAT,
            "name": self.trace.name,
            "fixed_bytes": self.fixed_bytes,
            "ops": ops,
            "forward_ops": sum(index < self.forward_ops for index in number),
            "outputs": sorted(number[made] for made in self._made_by(kept)),
        }

    def _made_by(self, storages: set[int]) -> set[int]:
        """The ops that must have run for the content of the storages."""
        made = {op for storage in storages for op in self.lasting.get(storage, ())}
        return made.union(self.storages[s]["base"] for s in storages if self.storages[s]["base"] is not None)

    def _latest(self, storage: int) -> int:
        while storage in self.versions:
            storage = self.versions[storage]
        return storage

    def _storage(self, base: int | None, size: int) -> int:
        self.storages.append({"base": base, "bytes": size})
        return len(self.storages) - 1

    def _value(self, tensor: int, producer: int | None, storage: int) -> int:
        self.values.append({"name": f"t{tensor}", "storage": storage, "producer": producer})
        self.value_of[tensor] = len(self.values) - 1
        return len(self.values) - 1

    def _storage_of(self, tensor: int) -> int:
        storage: int = self.values[self.value_of[tensor]]["storage"]
        return storage

    def _call(self, call: OperatorCall) -> None:
        op, outputs, effect = len(self.ops), list[int](), call.once
        inputs = list(dict.fromkeys(self.value_of[tensor] for tensor in (*call.reads, *call.writes)))
        for created in call.creates:
            alias = created.alias_of
            storage = self._storage(op, created.bytes) if alias is None else self._storage_of(alias)
            outputs.append(self._value(created.tensor, op, storage))
            if call.once and (alias is None or self.views_last):
                self.lasting.setdefault(storage, [])
        for tensor in call.writes:
            storage = self._storage_of(tensor)
            if storage in self.lasting:
                effect = True
                self.lasting[storage].append(op)
            elif self.storages[storage]["base"] != op:
                aliases = [other for other in self.value_of if self._storage_of(other) == storage]
                self.versions[storage] = self._storage(op, self.storages[storage]["bytes"])
                fresh = self._value(tensor, op, self.versions[storage])
                self.value_of |= dict.fromkeys(aliases, fresh)
                outputs.append(fresh)
        flags = ["random"] * call.random + ["effect"] * effect
        self.ops.append(
            {
                "name": f"{call.name}_{op}",
                "target": call.name,
                "inputs": inputs,
                "outputs": outputs,
                "time_ns": call.time_ns,
                "workspace_bytes": call.workspace_bytes,
                "flags": flags,
            }
        )

    def _mark_effects(self) -> None:
        """Every op runs, also one whose results nobody reads, but for mere views."""
        bases = {storage["base"] for storage in self.storages}
        needed = set(self.kept)
        for index in range(len(self.ops) - 1, -1, -1):
            op = self.ops[index]
            if not needed.intersection(op["outputs"]) and "effect" not in op["flags"]:
                if op["outputs"] and index not in bases:
                    continue
                op["flags"].append("effect")
            needed.update(op["inputs"])

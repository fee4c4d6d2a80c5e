"""A trace as a ``lowtide-graph/1`` object: unlike a plain DAG, with several results per operator, views and flags.

A tensor is a value, constants are graph inputs in external storages and count as ``fixed_bytes``. An operator whose results
nobody reads (a mere view is left out), one that runs once, and a write to what cannot be computed again have the flag
``effect``: planners run them once. A write is an operator that returns the new version, at which all aliases look from
then on. A storage is freed with its last use, not with its release; what is pinned or held at the end is an output.
"""

from __future__ import annotations

from typing import Any

from lowtide.trace.model import Constant, OperatorCall, Pin, Release, Trace

GRAPH_FORMAT = "lowtide-graph/1"


def trace_to_graph(trace: Trace) -> dict[str, Any]:
    """The ``lowtide-graph/1`` object."""
    return _Conversion(trace).build()


class _Conversion:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.value_of: dict[int, int] = {}  # live tensor -> its value
        self.lasting: set[int] = set()  # storages that cannot be computed again
        self.kept: dict[int, None] = {}

    def build(self) -> dict[str, Any]:
        calls = 0
        for event in self.trace.events:
            match event:
                case Constant():
                    self.lasting.add(len(self.storages))
                    self._value(event.tensor, None, self._storage(None, event.bytes))
                case OperatorCall():
                    calls += 1
                    self._call(event)
                case Release():
                    del self.value_of[event.tensor]
                case Pin():
                    self.kept[self.value_of[event.tensor]] = None
        self.kept |= dict.fromkeys(self.value_of.values())
        self._mark_effects()
        inputs = [index for index, value in enumerate(self.values) if value["producer"] is None]
        return {
            "format": GRAPH_FORMAT,
            "name": self.trace.name,
            "fixed_bytes": sum(storage["bytes"] for storage in self.storages if storage["base"] is None),
            "forward_ops": calls if self.trace.forward_calls is None else self.trace.forward_calls,
            "device": self.trace.device,
            "rng_state_bytes": 0,
            "inputs": inputs,
            "forward_outputs": [],
            "outputs": [value for value in self.kept if self.values[value]["producer"] is not None],
            "storages": self.storages,
            "values": self.values,
            "ops": self.ops,
        }

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
            if call.once:
                self.lasting.add(storage)
        for tensor in call.writes:
            storage = self._storage_of(tensor)
            if storage in self.lasting:
                effect = True
            elif self.storages[storage]["base"] != op:
                aliases = [other for other in self.value_of if self._storage_of(other) == storage]
                fresh = self._value(tensor, op, self._storage(op, self.storages[storage]["bytes"]))
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

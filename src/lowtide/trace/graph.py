"""A trace as a graph for planners, to compare them with online runs of the same program.

A ``lowtide-graph/1`` object has several results per operator, views and flags. A tensor becomes a value. Constants
become graph inputs in external storages, and count as ``fixed_bytes``. The flag ``effect`` makes planners run an
operator exactly once. It is set for operators whose results nobody reads (mere views are left out), for those that run
once, and for writes to what cannot be computed again. Any other write becomes an operator that returns the new version;
from then on, all aliases refer to this version. A storage is freed after its last use, not at its release. What is
pinned or held at the end is an output.

A ``lowtide-dag/1`` object has one result per operator, which has the bytes of all its results and is freed as a whole.
An operator that only makes aliases is left out together with its time; an alias stands for the operator whose storage
it shares. A write to what cannot be computed again is an operator of 0 bytes on which later readers depend. The format
cannot say that an operator must not run twice.
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
        self.views_last = views_last  # whether an alias made by a call that runs once makes a storage lasting
        self.ops: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.value_of: dict[int, int] = {}  # live tensor -> its value
        self.lasting: dict[int, list[int]] = {}  # storage that cannot be computed again -> ops that write it
        self.versions: dict[int, int] = {}  # written storage -> storage of the new version
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
        """The operators that must have run for the storages to have their contents."""
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
        """Every operator runs, even if nobody reads its results, except for mere views."""
        bases = {storage["base"] for storage in self.storages}
        needed = set(self.kept)
        for index in range(len(self.ops) - 1, -1, -1):
            op = self.ops[index]
            if not needed.intersection(op["outputs"]) and "effect" not in op["flags"]:
                if op["outputs"] and index not in bases:
                    continue
                op["flags"].append("effect")
            needed.update(op["inputs"])

"""A trace as a ``lowtide-dag/1`` object, so that planners can be compared with online runs of the same program.

A plain DAG has one output per operator and no views, so: the results of one operator become one, as large as all of them
and freed together; an alias is the operator whose storage it shares, and an operator that only makes aliases is left out
with its time; a write is an operator whose result is the new version. Constants are ``fixed_bytes``; a write to one,
or to the result of an operator that runs once, is an operator without bytes on which later readers depend. A result is
freed with its last use, not with its release. What is pinned or held at the end is an output. That an operator must not
run twice cannot be said in a DAG.
"""

from __future__ import annotations

from typing import Any

from lowtide.trace.model import Constant, OperatorCall, Pin, Release, Trace

DAG_FORMAT = "lowtide-dag/1"


def trace_to_dag(trace: Trace) -> dict[str, Any]:
    """The ``lowtide-dag/1`` object."""
    return _Conversion(trace).build()


class _Conversion:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops: list[dict[str, Any]] = []
        self.storage_of: dict[int, int] = {}  # live tensor -> the first tensor of its storage
        self.made_by: dict[int, tuple[int, ...]] = {}  # storage -> the ops that must have run for its content
        self.bytes: dict[int, int] = {}
        self.lasting: set[int] = set()
        self.pinned: set[int] = set()
        self.fixed_bytes = 0

    def build(self) -> dict[str, Any]:
        calls, forward_ops = 0, None
        for event in self.trace.events:
            match event:
                case Constant():
                    self._constant(event)
                case OperatorCall():
                    if calls == self.trace.forward_calls:
                        forward_ops = len(self.ops)
                    calls += 1
                    self._call(event)
                case Release():
                    del self.storage_of[event.tensor]
                case Pin():
                    self.pinned.add(self.storage_of[event.tensor])
        kept = self.pinned | set(self.storage_of.values())
        return {
            "format": DAG_FORMAT,
            "name": self.trace.name,
            "fixed_bytes": self.fixed_bytes,
            "ops": self.ops,
            "forward_ops": len(self.ops) if forward_ops is None else forward_ops,
            "outputs": sorted({op for storage in kept for op in self.made_by[storage]}),
        }

    def _constant(self, event: Constant) -> None:
        self.storage_of[event.tensor] = event.tensor
        self.made_by[event.tensor] = ()
        self.lasting.add(event.tensor)
        self.fixed_bytes += event.bytes

    def _call(self, call: OperatorCall) -> None:
        fresh = [created for created in call.creates if created.alias_of is None]
        written = list(dict.fromkeys(self.storage_of[tensor] for tensor in call.writes))
        if fresh or written or not call.creates:
            self._op(call, sum(created.bytes for created in fresh), written)
        for created in fresh:
            self.storage_of[created.tensor] = created.tensor
            self.bytes[created.tensor] = created.bytes
            self.made_by[created.tensor] = (len(self.ops) - 1,)
            if call.once:
                self.lasting.add(created.tensor)
        for created in call.creates:
            if created.alias_of is not None:
                self.storage_of[created.tensor] = self.storage_of[created.alias_of]

    def _op(self, call: OperatorCall, size: int, written: list[int]) -> None:
        read = dict.fromkeys(self.storage_of[tensor] for tensor in (*call.reads, *call.writes))
        inputs = sorted({op for storage in read for op in self.made_by[storage]})
        number = len(self.ops)
        for storage in written:
            lasting = storage in self.lasting
            size += 0 if lasting else self.bytes[storage]
            self.made_by[storage] = (*self.made_by[storage], number) if lasting else (number,)
        self.ops.append(
            {
                "name": f"{call.name}_{number}",
                "time_ns": call.time_ns,
                "bytes": size,
                "workspace_bytes": call.workspace_bytes,
                "inputs": inputs,
            }
        )

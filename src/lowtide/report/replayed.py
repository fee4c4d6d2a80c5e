"""A recorded program as a run: replayed within a budget, the replay written down as it goes by."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lowtide.report.run import Block, Run, Span
from lowtide.trace import ReplayResult, ReplayWatcher, Trace, simulate
from lowtide.trace.storages import TracedOperator, TracedStorage

ENDLESS_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Replay:
    """``run`` is what happened up to where the replay ended, ``result`` says how it ended."""

    run: Run
    result: ReplayResult


def replay(trace: Trace, budget_bytes: int, heuristic: str = "dtr-eq", policy: str = "eager") -> Replay:
    """Replay ``trace``, evicting by ``heuristic``; levels are those of the simulator while each operator runs."""
    recorder = _Recorder(trace.forward_calls)
    result = simulate(trace, budget_bytes, heuristic, policy=policy, most_slowdown=None, watcher=recorder)
    return Replay(recorder.run(), result)


class _Recorder(ReplayWatcher):
    def __init__(self, forward_calls: int | None) -> None:
        self.forward_calls = forward_calls
        self.spans: list[Span] = []
        self.blocks: list[Block] = []
        self.there: dict[TracedStorage, int] = {}
        self.clock_ns = self.calls = 0
        self.boundary: int | None = None

    def ran(self, operator: TracedOperator, again: bool) -> None:
        if any(tensor.storage.outside and tensor is tensor.storage.tensors[0] for tensor in operator.creates):
            return  # what makes a constant is no operator of the program
        if self.calls == self.forward_calls and not again and self.boundary is None:
            self.boundary = len(self.spans)
        self.calls += not again
        forward = self.boundary is None
        self.spans.append(Span(operator.name, operator.name, self.clock_ns, operator.time_ns, forward, again))
        self.clock_ns += operator.time_ns
        made = {tensor.storage for tensor in operator.creates if tensor is tensor.storage.tensors[0]}
        twice = sum(storage.bytes for storage in made if storage.resident)
        workspace = operator.needed_bytes - sum(storage.bytes for storage in made)
        index = len(self.spans) - 1
        for kind, size in (("second copy", twice), ("workspace", workspace)):
            if size:
                self.blocks.append(Block(kind, size, index, index, index))

    def came(self, storage: TracedStorage) -> None:
        self.there[storage] = len(self.blocks)
        owner = None if storage.outside else len(self.spans) - 1
        kind = "fixed" if storage.outside else "tensor"
        detail = "made outside of the program" if storage.outside else ""
        first = len(self.spans) if owner is None else owner
        self.blocks.append(Block(kind, storage.bytes, first, -1, owner, detail))

    def went(self, storage: TracedStorage) -> None:
        position = self.there.pop(storage)
        self.blocks[position] = dataclasses.replace(self.blocks[position], last=len(self.spans) - 1)

    def run(self) -> Run:
        end = len(self.spans)
        for position in self.there.values():
            self.blocks[position] = dataclasses.replace(self.blocks[position], last=end)
        lasting = tuple(block for block in self.blocks if block.first <= block.last)
        return Run(tuple(self.spans), lasting, end if self.boundary is None else self.boundary)

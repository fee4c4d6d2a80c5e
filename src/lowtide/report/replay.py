"""A recorded program as a step: replay it within a budget, and record the replay."""

from __future__ import annotations

import dataclasses

from lowtide.ir import Kind
from lowtide.report.profile import MemoryBlock, Span, StepProfile
from lowtide.trace import ReplayResult, ReplayWatcher, Trace, simulate
from lowtide.trace.storages import TracedOperator, TracedStorage

ENDLESS_BYTES = 1 << 62


def replay(trace: Trace, budget_bytes: int, heuristic: str = "dtr-eq") -> tuple[StepProfile, ReplayResult]:
    """The step up to the end of the replay, with evictions by ``heuristic``, and how it ended.

    Levels are those of the simulator while each operator runs.
    """
    recorder = _Recorder(trace.forward_calls)
    result = simulate(trace, budget_bytes, heuristic, most_slowdown=None, watcher=recorder)
    return recorder.profile(), result


class _Recorder(ReplayWatcher):
    def __init__(self, forward_calls: int | None) -> None:
        self.forward_calls = forward_calls
        self.spans: list[Span] = []
        self.blocks: list[MemoryBlock] = []
        self.there: dict[TracedStorage, int] = {}
        self.clock_ns = self.calls = 0
        self.boundary: int | None = None

    def ran(self, operator: TracedOperator, again: bool) -> None:
        made = {tensor.storage for tensor in operator.creates if tensor is tensor.storage.tensors[0]}
        if any(storage.outside for storage in made):
            return  # constants are not made by operators of the program
        index = len(self.spans)
        if self.calls == self.forward_calls and not again and self.boundary is None:
            self.boundary = index
        self.calls += not again
        forward = self.boundary is None
        self.spans.append(Span(operator.name, operator.name, self.clock_ns, operator.time_ns, forward, again))
        self.clock_ns += operator.time_ns
        twice = sum(storage.bytes for storage in made if storage.resident)
        workspace = operator.needed_bytes - sum(storage.bytes for storage in made)
        for kind, size in ((Kind.SECOND_COPY, twice), (Kind.WORKSPACE, workspace)):
            if size:
                self.blocks.append(MemoryBlock(kind, size, index, index, self.spans[-1]))

    def came(self, storage: TracedStorage) -> None:
        self.there[storage] = len(self.blocks)
        ran = len(self.spans)
        if storage.outside:
            block = MemoryBlock(Kind.FIXED, storage.bytes, ran, -1, None, "made outside of the program")
        else:
            block = MemoryBlock(Kind.TENSOR, storage.bytes, ran - 1, -1, self.spans[-1])
        self.blocks.append(block)

    def went(self, storage: TracedStorage, last: int | None = None) -> None:
        position = self.there.pop(storage)
        last = len(self.spans) - 1 if last is None else last
        self.blocks[position] = dataclasses.replace(self.blocks[position], last=last)

    def profile(self) -> StepProfile:
        end = len(self.spans)
        for storage in [*self.there]:
            self.went(storage, end)
        lasting = tuple(block for block in self.blocks if block.first <= block.last)
        boundary = end if self.boundary is None else self.boundary
        return StepProfile(tuple(self.spans), lasting, boundary, self.clock_ns)

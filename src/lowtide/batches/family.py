"""One model at every batch size: graph and costs, without a capture for each.

Two small batches are captured and measured. If both give the same operators in the same order, all numbers for other
batches lie on a line through the two: bytes exactly, times and workspaces approximately. If not, every batch is
captured. The final answer is confirmed by a capture of that batch (``batches.find``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.batches.samples import Samples
from lowtide.capture import Captured, capture
from lowtide.cost import analytical_costs
from lowtide.ir import Costs, Graph, keep_all_schedule, simulate
from lowtide.memory.allocators import free_memory
from lowtide.offload import with_offload
from lowtide.pipeline import program_costs
from lowtide.program import Program
from lowtide.program.sizes import outside_of, program_device
from lowtide.progress import Progress
from lowtide.settings import Settings

SMALL_BATCHES = (2, 8)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The program at one batch size. ``resident_bytes``: parameters, inputs, gradients, optimizer states."""

    batch: int
    graph: Graph
    costs: Costs
    resident_bytes: int

    @property
    def unconstrained_bytes(self) -> int:
        """The peak of the pass without recomputation."""
        return simulate(self.graph, self.costs, keep_all_schedule(self.graph)).peak_bytes


class Family:
    """``member(batch)``: the program for any batch size; ``captured(batch)`` never estimates. ``settings``: for the
    second memory."""

    def __init__(
        self, model: nn.Module, samples: Samples, settings: Settings, on_progress: Progress | None = None
    ) -> None:
        self.model, self.samples, self.on_progress = model, samples, on_progress
        self.offload = settings.offload, settings.offload_budget
        self.member: Callable[[int], Member] = functools.cache(self._member)
        (captured, self.first), (_, self.second) = map(self.captured, SMALL_BATCHES)
        self.device = program_device(captured.program)
        self.uniform = self.belongs(self.second)

    def belongs(self, member: Member) -> bool:
        """Whether ``member`` has the same operators as the others, so that their schedules are valid for it."""
        return _shape_free(self.first.graph) == _shape_free(member.graph)

    def refine(self, member: Member) -> None:
        """Use ``member`` as the second point of the lines from now on."""
        if self.uniform and self.belongs(member) and member.batch > self.second.batch:
            self.second = member
            self.member = functools.cache(self._member)

    def captured(self, batch: int) -> tuple[Captured, Member]:
        """Capture the call with ``batch``. Operators are measured if the device has room for the largest of them."""
        args, kwargs = self.samples.fake(batch)
        with torch.enable_grad():
            captured = capture(self.model, args, kwargs)
        program = captured.program
        costs = program_costs(program, self.on_progress) if _has_room(program) else analytical_costs(program)
        costs = with_offload(costs, *self.offload, program_device(program))
        return captured, Member(batch, program.graph, costs, outside_of(program, self.model, None).bytes)

    def _member(self, batch: int) -> Member:
        if not self.uniform:
            return self.captured(batch)[1]
        first, second = self.first, self.second

        def line(low: Any, high: Any) -> Any:
            """Rounded up, so that memory is never underestimated."""
            run = second.batch - first.batch
            return np.maximum(0, low - (high - low) * (first.batch - batch) // run)

        columns = ("time_ns", "workspace_bytes", "storage_bytes")
        changed = {name: line(getattr(first.costs, name), getattr(second.costs, name)) for name in columns}
        resident = int(line(first.resident_bytes, second.resident_bytes))
        costs = dataclasses.replace(first.costs, **changed)
        return Member(batch, first.graph, with_offload(costs, *self.offload, self.device), resident)


def _shape_free(graph: Graph) -> Graph:
    """The graph without shapes and names, which differ between batch sizes."""
    values = tuple(dataclasses.replace(value, shape=(), name="") for value in graph.values)
    ops = tuple(dataclasses.replace(op, name="") for op in graph.ops)
    return dataclasses.replace(graph, values=values, ops=ops)


def _has_room(program: Program) -> bool:
    """Whether any operator could run alone, with a workspace as large as its operands."""
    device = program_device(program)
    values = (
        {program.graph.values[v].storage: program.metas[v].storage_bytes for v in (*op.inputs, *op.outputs)}
        for op in program.graph.ops
    )
    largest = max((sum(sizes.values()) for sizes in values), default=0)
    free = free_memory(device)
    return free is None or 2 * largest <= free

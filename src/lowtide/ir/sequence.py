"""From a compute sequence to a schedule.

A sequence of op ids says everything that a planner decides: liveness, and so every ``Free``, follows from it. The
convention: a compute renews every storage of the op (except those handed to the caller), and a storage lives from a
compute to its last use before the next one. View ops are not part of the decision; they are computed where their values
are first used in each life of the storage.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule, Step
from lowtide.ir.simulator import owned_storages


def keep_all_schedule(graph: Graph) -> Schedule:
    """The program without recomputation."""
    return schedule_from_sequence(graph, range(len(graph.ops)))


def schedule_from_sequence(graph: Graph, sequence: Sequence[int]) -> Schedule:
    """The canonical schedule of ``sequence``; see the module's docstring.

    Ops that nobody needs and recomputes whose results nobody uses are dropped. Effects stay, and so does the first compute
    of an op that runs again, so that first computes keep the program's order.
    """
    return _Builder(graph).build(sequence)


def is_view(graph: Graph, op: Op) -> bool:
    """Whether ``op`` allocates nothing and only forms views of storages that exist."""
    if not op.outputs or op.effect or op.random:
        return False
    return all(graph.storages[graph.values[value].storage].base != op.id for value in op.outputs)


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.owned = owned_storages(graph)
        self.view = [is_view(graph, op) for op in graph.ops]
        self.held = {graph.values[value].storage for value in graph.forward_outputs}
        self.held = {s for s in self.held if not graph.storages[s].external}
        self.storage_of = [value.storage for value in graph.values]

    def build(self, sequence: Sequence[int]) -> Schedule:
        steps, forward_end = self._with_views([op for op in sequence if not self.view[op]])
        kept = self._used(steps)
        computes = [op for op, keep in zip(steps, kept, strict=True) if keep]
        return self._with_frees(computes, self._boundary(computes[: sum(kept[:forward_end])]))

    def _boundary(self, computes: Sequence[int]) -> int:
        """Just after the last first compute of a forward op."""
        seen: set[int] = set()
        boundary = 0
        for index, op in enumerate(computes):
            if op not in seen and self.graph.ops[op].phase is Phase.FORWARD:
                boundary = index + 1
            seen.add(op)
        return boundary

    def _with_views(self, sequence: Sequence[int]) -> tuple[list[int], int]:
        """Insert the view ops, each where its value is first read in the current life of its storage.

        The second result is the number of steps in the forward pass: a view of the forward pass that only the backward
        pass reads is formed there, and must not move the boundary.
        """
        graph = self.graph
        live_views: dict[int, set[int]] = {}  # storage -> values formed by views in its current life
        external_views: set[int] = set()
        steps: list[int] = []

        def need(value: int) -> None:
            pending = [value]
            chain: list[int] = []
            while pending:
                producer = graph.values[pending[-1]].producer
                storage = self.storage_of[pending.pop()]
                if producer is None or not self.view[producer]:
                    continue
                formed = external_views if graph.storages[storage].external else live_views.setdefault(storage, set())
                if not formed.issuperset(graph.ops[producer].outputs):
                    chain.append(producer)
                    pending.extend(graph.ops[producer].inputs)
            for producer in sorted(set(chain)):
                steps.append(producer)
                for output in graph.ops[producer].outputs:
                    storage = self.storage_of[output]
                    target = (
                        external_views if graph.storages[storage].external else live_views.setdefault(storage, set())
                    )
                    target.add(output)

        boundary = self._boundary(sequence)
        forward_end = 0
        for index, op in enumerate(sequence):
            if index == boundary:
                for value in graph.forward_outputs:
                    need(value)
                forward_end = len(steps)
            for value in graph.ops[op].inputs:
                need(value)
            steps.append(op)
            for storage in self.owned[op]:
                if storage not in self.held:
                    live_views[storage] = set()
        if boundary == len(sequence):
            for value in graph.forward_outputs:
                need(value)
            forward_end = len(steps)
        for value in graph.outputs:
            need(value)
        return steps, forward_end

    def _used(self, steps: Sequence[int]) -> list[bool]:
        """Which computes are needed, by one sweep from the end."""
        graph = self.graph
        needed = {self.storage_of[v] for v in (*graph.outputs, *graph.forward_outputs)}
        needed_views = {*graph.outputs, *graph.forward_outputs}
        first: dict[int, int] = {}
        for index, op_id in enumerate(steps):
            first.setdefault(op_id, index)
        kept = [False] * len(steps)
        running: set[int] = set()  # ops that run later: they first run in their place, to keep the program's order
        for index in range(len(steps) - 1, -1, -1):
            op = graph.ops[steps[index]]
            if self.view[op.id]:
                keep = any(value in needed_views for value in op.outputs)
            else:
                keep = (op.effect or op.id in running) and first[op.id] == index
                keep = keep or any(
                    storage in needed and (storage not in self.held or first[op.id] == index)
                    for storage in self.owned[op.id]
                )
                keep = keep or any(
                    v in needed_views and self.storage_of[v] not in self.owned[op.id] for v in op.outputs
                )
            if not keep:
                continue
            kept[index] = True
            running.add(op.id)
            for value in op.outputs:
                needed_views.discard(value)
            for storage in self.owned[op.id]:
                if storage not in self.held or first[op.id] == index:
                    needed.discard(storage)
            for value in op.inputs:
                needed.add(self.storage_of[value])
                needed_views.add(value)
        return kept

    def _with_frees(self, computes: Sequence[int], boundary: int) -> Schedule:
        graph = self.graph
        ends = self._ends(computes)
        counts: dict[int, int] = {}
        for op in computes:
            counts[op] = counts.get(op, 0) + 1
        seen: set[int] = set()
        steps: list[Step] = []
        position = 0
        last_forward = boundary - 1
        for index, op in enumerate(computes):
            if graph.ops[op].random and counts[op] > 1:
                steps.append(RestoreRng(op) if op in seen else SaveRng(op))
            seen.add(op)
            steps.append(Compute(op))
            steps.extend(Free(storage) for storage in ends.get(index, ()))
            if index == last_forward:
                position = len(steps)
        return Schedule(tuple(steps), position)

    def _ends(self, computes: Sequence[int]) -> dict[int, list[int]]:
        """Storages to free after each compute: their last use before the next compute of their base."""
        graph = self.graph
        ends: dict[int, list[int]] = {}
        alive = {self.storage_of[value] for value in (*graph.outputs, *graph.forward_outputs)}
        for index in range(len(computes) - 1, -1, -1):
            op = graph.ops[computes[index]]
            touched = dict.fromkeys((*self.owned[op.id], *(self.storage_of[v] for v in (*op.outputs, *op.inputs))))
            for storage in touched:
                if storage not in alive and not graph.storages[storage].external:
                    ends.setdefault(index, []).append(storage)
                    alive.add(storage)
            for storage in self.owned[op.id]:
                if storage not in self.held:
                    alive.discard(storage)
        return ends

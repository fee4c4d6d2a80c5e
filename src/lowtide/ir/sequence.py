"""Turn a compute sequence (op ids in execution order, with repeats) into a schedule.

The sequence holds all that a planner decides: liveness, and so every ``Free``, follows from it. By convention a compute
renews every storage that the op allocates, and a storage lives from a compute to its last use before the next one. Two kinds
of storages are never renewed: those handed to the caller (with ``released``, only after the hand-over), and those into which
another op that is not a view puts a value, which a renewal would lose. Planners do not place view ops: each is computed where
its value is first used in each lifetime of the storage. An op overwrites an input in ``overwrites`` whenever it is the last
to use it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lowtide.ir.costs import Costs
from lowtide.ir.graph import STATE_TARGETS, Graph, Op, Phase
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule, Step
from lowtide.ir.transfers import timing


def keep_all_schedule(graph: Graph) -> Schedule:
    """Return the schedule without recomputation, which frees each storage after its last use."""
    return schedule_from_sequence(graph, range(len(graph.ops)))


def plain_time_ns(graph: Graph, costs: Costs) -> int:
    """Return the time of the program without recomputation, the baseline for overheads. If collectives overlap with
    computation, transfers of optimizer states take no time here."""
    if not costs.collectives_beside:
        return costs.total_time_ns
    moving = [op.id for op in graph.ops if op.target in STATE_TARGETS]
    if moving:
        times = costs.time_ns.copy()
        times[moving] = 0
        costs = replace(costs, time_ns=times)
    return timing(graph, costs, keep_all_schedule(graph)).time_ns


def schedule_from_sequence(graph: Graph, sequence: Sequence[int], *, released: bool = False) -> Schedule:
    """Return the canonical schedule of ``sequence``; see the module's docstring. Ops and recomputes whose results are not used
    are dropped. Effects stay, and so does the first compute of an op that runs again, so that first computes keep the
    program's order. ``released``: recomputes before the backward pass also renew storages handed to the caller, which shortens
    the life of these; the hand-over (the boundary) then comes after the last such recompute."""
    return _Builder(graph, released).build(sequence)


def is_view(graph: Graph, op: Op) -> bool:
    """Whether ``op`` allocates nothing and only forms views of existing storages."""
    return graph.views[op.id]


def needed_ops(graph: Graph) -> set[int]:
    """Return the ops that the outputs or an effect depend on, and the effects themselves."""
    producers = [graph.values[v].producer for v in (*graph.outputs, *graph.forward_outputs)]
    needed = {op for op in producers if op is not None}
    for op in reversed(graph.ops):
        if op.id in needed or op.effect:
            needed.add(op.id)
            needed |= {p for p in (graph.values[value].producer for value in op.inputs) if p is not None}
            # A value in another op's storage exists only while that storage does.
            needed |= {base for one in graph.touched[op.id] if (base := graph.storages[one].base) is not None}
    return needed


def shared_storages(graph: Graph) -> set[int]:
    """Return the storages into which an op that is neither their base nor a view puts a value."""
    made = ((op, storage) for op, view in enumerate(graph.views) if not view for storage in graph.made[op])
    return {storage for op, storage in made if graph.storages[storage].base != op}


def collectives_of(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the collectives of ``schedule`` in the order in which it runs them. Ranks whose orders differ deadlock."""
    return [step.op for step in schedule.steps if isinstance(step, Compute) and graph.ops[step.op].collective]


def may_run_early(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a collective that reads only graph inputs (e.g. the all-gather of a parameter), so that it may first
    run before operators that precede it in the program. Running it earlier runs the same operators and needs no less memory,
    except that its workspace is needed elsewhere."""
    return (
        op.collective
        and not (op.effect or op.random)
        and all(graph.storages[one].external for one in graph.read[op.id])
        and all(_is_given(graph, value) for value in op.inputs)
    )


def _is_given(graph: Graph, value: int) -> bool:
    """Whether a value is a graph input or a view of one."""
    producer = graph.values[value].producer
    return producer is None or (
        graph.views[producer] and all(_is_given(graph, one) for one in graph.ops[producer].inputs)
    )


class _Builder:
    def __init__(self, graph: Graph, released: bool) -> None:
        self.graph = graph
        self.released = released
        self.owned = graph.owned
        self.view = graph.views
        self.storage_of = [value.storage for value in graph.values]
        self.handed = {*graph.storages_of(graph.forward_outputs)}
        self.shared = shared_storages(graph)

    def build(self, sequence: Sequence[int]) -> Schedule:
        graph = self.graph
        formed, forward_end = self._with_views([op for op in sequence if not self.view[op]])
        frees = self._frees(formed, forward_end)
        boundary = self._boundary([formed[index] for index in frees if index < forward_end])
        computes = [(formed[index], freed) for index, freed in frees.items()]
        counts = Counter(op for op, _ in computes)
        seen: set[int] = set()
        live: set[int] = set()
        steps: list[Step] = []
        position = 0
        for index, (op, freed) in enumerate(computes):
            if graph.ops[op].random and counts[op] > 1:
                steps.append(RestoreRng(op) if op in seen else SaveRng(op))
            seen.add(op)
            over = (self.storage_of[value] for value in graph.ops[op].overwrites)  # one that dies with the op is taken
            into = next((storage for storage in over if storage in freed), None)
            steps.append(Compute(op, None if live.intersection(self.owned[op]) else into))
            steps.extend(Free(storage) for storage in freed)
            live.update(self.owned[op])
            live.difference_update(freed)
            if index == boundary - 1:
                position = len(steps)
        return Schedule(tuple(steps), position)

    def _boundary(self, computes: Sequence[int]) -> int:
        """Return the boundary: just after the last first compute of a forward op; with ``released``, also after recomputes that
        renew storages handed to the caller, or form views of them."""
        firsts = {op: index for index, op in reversed(list(enumerate(computes)))}
        boundary = max((i + 1 for op, i in firsts.items() if self.graph.ops[op].phase is Phase.FORWARD), default=0)
        for index in itertools.count(boundary) if self.released else ():
            if index == len(computes) or self.graph.ops[computes[index]].phase is Phase.BACKWARD:
                break
            made = (self.storage_of[value] for value in self.graph.ops[computes[index]].outputs)
            if not self.handed.isdisjoint((*self.owned[computes[index]], *made)):
                boundary = index + 1
        return boundary

    def _lasting(self, storage: int, forward: bool) -> bool:
        """Whether a recompute, in the forward pass if ``forward``, leaves the storage as it is instead of renewing it."""
        return storage in self.shared or (storage in self.handed and not (forward and self.released))

    def _with_views(self, sequence: Sequence[int]) -> tuple[list[int], int]:
        """Insert the view ops, each where its value is first read in the current lifetime of its storage. The second result
        is the number of steps in the forward pass: a view of the forward pass that only the backward pass reads is
        formed in the backward pass, and must not move the boundary."""
        graph = self.graph
        formed: list[set[int]] = [set() for _ in graph.storages]  # values that views formed in the current lifetime
        steps: list[int] = []
        boundary = self._boundary(sequence)
        final = self._final_outputs(sequence, boundary)
        forward_end = 0
        for index, op in enumerate(sequence):
            if index == boundary:
                self._form(graph.forward_outputs, formed, steps)
                forward_end = len(steps)
            self._form(graph.ops[op].inputs, formed, steps)
            steps.append(op)
            for storage in self.owned[op]:
                if not self._lasting(storage, index < boundary):
                    formed[storage].clear()
            self._form(final.get(index, ()), formed, steps)
        if boundary == len(sequence):
            self._form(graph.forward_outputs, formed, steps)
            forward_end = len(steps)
        self._form(graph.outputs, formed, steps)
        return steps, forward_end

    def _final_outputs(self, sequence: Sequence[int], boundary: int) -> dict[int, list[int]]:
        """Map steps of the backward pass to the graph's outputs that are final after them: nothing touches the storages that
        these are formed from any more. Formed there, and not at the end, a gradient can leave as soon as it is final."""
        last: dict[int, int] = {}
        for index, op_id in enumerate(sequence):
            op = self.graph.ops[op_id]
            for value in (*op.inputs, *op.outputs):
                last[self.storage_of[value]] = index
        final: dict[int, list[int]] = {}
        for value in self.graph.outputs:
            index = max(last.get(storage, -1) for storage in self._formed_from(value))
            if index >= boundary:
                final.setdefault(index, []).append(value)
        return final

    def _formed_from(self, value: int) -> set[int]:
        """Return the storages of ``value`` and of all values that the chain of views up to it reads."""
        waiting, found = [value], {self.storage_of[value]}
        while waiting:
            producer = self.graph.values[waiting.pop()].producer
            if producer is not None and self.view[producer]:
                inputs = self.graph.ops[producer].inputs
                found.update(self.storage_of[other] for other in inputs)
                waiting += inputs
        return found

    def _form(self, values: Sequence[int], formed: list[set[int]], steps: list[int]) -> None:
        """Append the view ops that ``values`` still need, in the program's order."""
        pending = list(values)
        missing: set[int] = set()
        while pending:
            value = pending.pop()
            producer = self.graph.values[value].producer
            if producer is None or not self.view[producer] or producer in missing:
                continue
            if value not in formed[self.storage_of[value]]:
                missing.add(producer)
                pending.extend(self.graph.ops[producer].inputs)
        for producer in sorted(missing):
            steps.append(producer)
            for output in self.graph.ops[producer].outputs:
                formed[self.storage_of[output]].add(output)

    def _frees(self, steps: Sequence[int], forward_end: int) -> dict[int, list[int]]:
        """Map the index of each needed compute to the storages to free after it: those of which it is the last use before the
        next compute of their base. One sweep from the end. ``forward_end``: the number of steps of the forward pass.
        """
        graph = self.graph
        needed_values = {*graph.outputs, *graph.forward_outputs}
        needed = {self.storage_of[value] for value in needed_values}
        alive = set(needed)
        first = {op: index for index, op in reversed(list(enumerate(steps)))}
        frees: dict[int, list[int]] = {}
        running: set[int] = set()  # ops that run later: their first compute is kept, to keep the program's order
        for index in range(len(steps) - 1, -1, -1):
            op = graph.ops[steps[index]]
            own, is_first = self.owned[op.id], first[op.id] == index
            renewed = [s for s in own if not self._lasting(s, index < forward_end)]
            made = own if is_first else renewed
            foreign = [v for v in op.outputs if self.storage_of[v] not in own]
            keep = not needed.isdisjoint(made)
            if is_first and not self.view[op.id]:
                keep = keep or op.effect or op.id in running
            if is_first or self.view[op.id]:  # shared storages are not renewed, so their values stay
                keep = keep or not needed_values.isdisjoint(foreign)
            if not keep:
                continue
            running.add(op.id)
            needed_values.difference_update(op.outputs)
            needed.difference_update(made)
            needed_values.update(op.inputs)
            needed.update(self.storage_of[value] for value in op.inputs)
            touched = dict.fromkeys((*own, *(self.storage_of[v] for v in (*op.outputs, *op.inputs))))
            frees[index] = [s for s in touched if s not in alive and not graph.storages[s].external]
            alive.update(frees[index])
            alive.difference_update(renewed)
        return dict(reversed(frees.items()))

"""Model transfers as recomputations: split graphs, in which fetching a storage is an operator like any other.

Every operator that allocates storages which may move is split in two. The computing part returns a *handle* of 0 bytes for
each of these storages, as if the results were in the second memory; a *fetch* op, which reads only the handle, allocates the
storage. The first run of a fetch, right after the operator, stands for the result itself and takes no time; a later run stands
for the transfer back, at a price. So any planner of sequences decides between keeping, recomputing and moving. Its schedule
is translated back: a fetch that runs again becomes a ``Fetch``, and the storage is offloaded once it was computed.

While an operator runs, the storages that it allocates count as its workspace, and handles are empty. So the translated
schedule needs the bytes that the planner saw, unless it recomputes something between an operator and the first of its fetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Offload,
    Op,
    Phase,
    Schedule,
    Step,
    Storage,
    Value,
    shared_storages,
)

MOST_NS = 2**46  # a price, 19 hours: sums of them stay within 64 bits


def movable_storages(graph: Graph, costs: Costs) -> list[int]:
    """Return the storages that planners may move: not external, not empty, filled by one operator alone, which is no effect,
    and not handed to the caller, neither at the end of the forward pass nor, like gradients, as soon as they are final."""
    producers = ((value, graph.values[value].producer) for value in graph.outputs)
    gradients = [value for value, op in producers if op is not None and graph.ops[op].phase is Phase.BACKWARD]
    fixed = {*graph.storages_of((*graph.forward_outputs, *gradients))}
    fixed |= {storage for op in graph.ops if op.effect for storage in graph.owned[op.id]}
    return [storage for storage in all_movable(graph, costs) if storage not in fixed]


def all_movable(graph: Graph, costs: Costs) -> list[int]:
    """Return the storages that some valid schedule moves, for bounds: not external, not empty, filled by one operator alone.
    Storages handed to the caller may move before the hand-over."""
    fixed = shared_storages(graph) | {storage.id for storage in graph.storages if storage.external}
    return [s.id for s in graph.storages if s.id not in fixed and costs.storage_bytes[s.id] > 0]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A split ``graph`` with its ``costs``. ``computed``: its op -> the original op, ``None`` for a fetch; ``fetched``: its op
    -> the storage that it fetches. Storages keep their numbers; handles come after them."""

    graph: Graph
    costs: Costs
    computed: tuple[int | None, ...]
    fetched: Mapping[int, int]
    owned: Sequence[Collection[int]]  # op of the original graph -> storages

    def priced(self, prices: Mapping[int, int]) -> Split:
        """Return the same graph with other prices of storages."""
        times = self.costs.time_ns.copy()
        for op, storage in self.fetched.items():
            times[op] = min(prices[storage], MOST_NS)
        return replace(self, costs=replace(self.costs, time_ns=times))

    @property
    def computes(self) -> dict[int, int]:
        """Op of the original graph -> the op of this graph that computes it."""
        return {op: number for number, op in enumerate(self.computed) if op is not None}

    @property
    def fetches(self) -> dict[int, int]:
        """Storage -> the op that fetches it."""
        return {storage: number for number, storage in self.fetched.items()}

    def schedule(self, found: Schedule) -> Schedule:
        """Translate a schedule of this graph to one of the original graph. A storage that moves is offloaded once it was
        computed, freed at the same places, and fetched at each later run of its fetch op."""
        counts = Counter(step.op for step in found.steps if isinstance(step, Compute))
        fetches = self.fetches
        moved = {storage for storage, op in fetches.items() if counts[op] > 1}
        steps: list[Step] = []
        live: set[int] = set()
        met: set[int] = set()
        boundary = None
        for index, step in enumerate(found.steps):
            boundary = len(steps) if index == found.boundary else boundary
            if isinstance(step, Free):
                if step.storage in live:
                    steps.append(step)
                    live.discard(step.storage)
                continue
            assert not isinstance(step, (Offload, Fetch)), "a schedule of a split graph moves nothing"
            if (op := self.computed[step.op]) is not None:
                steps.append(replace(step, op=op))
                if isinstance(step, Compute):
                    # Free movable storages whose fetch op does not run next.
                    gone = [
                        s
                        for s in self.owned[op]
                        if s not in live and s in fetches and (step.op in met or not counts[fetches[s]])
                    ]
                    steps += map(Free, gone)
                    live.update(s for s in self.owned[op] if s not in gone)
                    met.add(step.op)
            else:
                storage = self.fetched[step.op]
                if step.op in met:
                    steps.append(Fetch(storage))
                    live.add(storage)
                elif storage in moved:
                    steps.append(Offload(storage))
                met.add(step.op)
        return Schedule(tuple(steps), len(steps) if boundary is None else boundary)

    def sequence(self, schedule: Schedule) -> list[int]:
        """Translate a ``schedule`` of the original graph to a compute sequence of this one. Movable storages are fetched
        instead of recomputed; storages that ``schedule`` fetches but that cannot move here are recomputed."""
        computes, fetches = self.computes, self.fetches
        sequence: list[int] = []
        met: set[int] = set()
        for step in schedule.steps:
            if isinstance(step, Compute):
                again = step.op in met
                moving = [fetches[storage] for storage in self.owned[step.op] if storage in fetches]
                if not (again and len(moving) == len(self.owned[step.op]) > 0):
                    sequence.append(computes[step.op])
                sequence += moving
                met.add(step.op)
            elif isinstance(step, Fetch):
                base = self.graph.storages[step.storage].base
                assert base is not None
                sequence.append(fetches.get(step.storage, base))
        return sequence


def split(
    graph: Graph,
    costs: Costs,
    prices: Mapping[int, int],
    *,
    moves_only: bool = False,
    floor: bool = False,
    apart: bool = False,
) -> Split:
    """Split the graph so that the storages of ``prices`` may move, each at its price in ns. ``moves_only``: forbid all
    recomputation. ``floor``: for bounds, an operator that can overwrite its input needs no memory for its result while it runs;
    by default an operator whose result may move overwrites nothing. ``apart``: an operator may be recomputed even if all of its
    results may move; by default these are always fetched, and the price stands for the cheaper of both."""
    return _Splitter(graph, costs, prices, moves_only, floor, apart).build()


def split_for_nothing(graph: Graph, costs: Costs) -> Split:
    """Split the graph so that everything moves for free: a budget that no schedule of it fits is infeasible with transfers."""
    return split(graph, costs, dict.fromkeys(all_movable(graph, costs), 0), floor=True)


class _Splitter:
    def __init__(
        self, graph: Graph, costs: Costs, prices: Mapping[int, int], moves_only: bool, floor: bool, apart: bool
    ) -> None:
        self.graph, self.costs, self.moves_only, self.floor, self.apart = graph, costs, moves_only, floor, apart
        self.prices = {storage: min(price, MOST_NS) for storage, price in prices.items()}
        self.ops: list[Op] = []
        self.times: list[int] = []
        self.workspaces: list[int] = []
        self.values = list(graph.values)
        self.handles: list[Storage] = []
        self.computed: list[int | None] = []  # by op of the split graph
        self.fetched: dict[int, int] = {}
        self.bases: dict[int, int] = {}  # storage -> the op that allocates it

    def build(self) -> Split:
        graph, costs = self.graph, self.costs
        forward = 0
        for op, owned in zip(graph.ops, graph.owned, strict=True):
            moving = [storage for storage in owned if storage in self.prices]
            handles = self._compute(op, owned, moving)
            for storage, handle in zip(moving, handles, strict=True):
                self._fetch(op, storage, handle)
            if op.id < graph.forward_ops:
                forward = len(self.ops)
        storages = [replace(s, base=self.bases.get(s.id)) for s in graph.storages]
        sizes = np.concatenate((costs.storage_bytes, np.zeros(len(self.handles), np.int64)))
        whole = replace(
            graph,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=(*storages, *self.handles),
            forward_ops=forward,
        )
        priced = replace(
            costs,
            time_ns=np.array(self.times, np.int64),
            workspace_bytes=np.array(self.workspaces, np.int64),
            storage_bytes=sizes,
            second_memory=None,
        )
        return Split(whole, priced, tuple(self.computed), self.fetched, graph.owned)

    def _compute(self, op: Op, owned: Collection[int], moving: Collection[int]) -> list[int]:
        """Add the computing part of the op. Returns the handles of its movable storages."""
        number = len(self.ops)
        outputs = [value for value in op.outputs if self.graph.values[value].storage not in moving]
        handles = []
        for storage in moving:
            handle = len(self.values)
            self.handles.append(Storage(len(self.graph.storages) + len(self.handles), number, (handle,)))
            self.values.append(Value(handle, f"handle_{storage}", self.handles[-1].id, number))
            handles.append(handle)
        for value in outputs:
            self.values[value] = replace(self.values[value], producer=number)
        self.bases.update((storage, number) for storage in owned if storage not in moving)
        within = self.floor and op.overwrites  # its only storage takes the place of one of equal size
        whole = 0 if within else sum(int(self.costs.storage_bytes[storage]) for storage in moving)
        over = () if moving else op.overwrites
        whole_moves = len(owned) == len(moving) and not self.apart
        once = op.once or (bool(owned) and (self.moves_only or whole_moves))
        self.ops.append(replace(op, id=number, outputs=(*outputs, *handles), overwrites=over, once=once))
        self.times.append(int(self.costs.time_ns[op.id]))
        self.workspaces.append(int(self.costs.workspace_bytes[op.id]) + whole)
        self.computed.append(op.id)
        return handles

    def _fetch(self, op: Op, storage: int, handle: int) -> None:
        number = len(self.ops)
        values = tuple(value for value in op.outputs if self.graph.values[value].storage == storage)
        for value in values:
            self.values[value] = replace(self.values[value], producer=number)
        self.bases[storage] = number
        self.ops.append(Op(number, f"fetch_{op.name}", "lowtide.fetch", (handle,), values, op.phase))
        self.times.append(self.prices[storage])
        self.workspaces.append(0)
        self.computed.append(None)
        self.fetched[number] = storage

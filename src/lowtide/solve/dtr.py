"""``dtr``: the online heuristics of dynamic tensor rematerialization, run ahead of time on a static graph.

Runs the program in order within the budget. While the next operator does not fit, evicts the resident storage with the least
score (``lowtide.eviction.heuristics``); an evicted storage is recomputed when it is read, with evicted inputs recursively.
Storages that the program does not use again are released at once, as by reference counting. The heuristics know nothing of
the future, which makes them online. Kirisame et al., ICLR 2021, arXiv 2006.09616, section 2.

No guarantee: recursive recomputation can exceed the budget or thrash; a run ends after six computes per node. Several limits
at and below the budget are tried, since generator states and the memory of views are not counted here; the quickest schedule
that really fits is the answer. Storages that were handed to the caller, or whose operator runs only once, cannot be evicted.
O(evictions x resident storages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lowtide.eviction import HEURISTICS, Entry, Pool
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.model.ragged import rows
from lowtide.solve.options import Options, one_of
from lowtide.solve.outcome import quickest_eviction
from lowtide.solve.problem import Problem, Solution

_LIMITS = (1.0, 0.97, 0.93, 0.88)
_STEPS_PER_NODE = 6


@dataclass(frozen=True, slots=True)
class Dtr(Options):
    """The planner ``dtr``. ``heuristic``: one of ``lowtide.eviction``'s. ``sample``: consider only a random sample of the
    evictable storages, and none below 1 % of the mean size, as the paper's prototype does."""

    heuristic: str = one_of("dtr-eq", tuple(HEURISTICS))
    sample: bool = False

    def search(self, problem: Problem) -> Solution:
        def sequences(model: CompactGraph, budget_bytes: int, limits: Sequence[float] = _LIMITS) -> Iterator[Indices]:
            room = max(budget_bytes - model.fixed_bytes, 0)
            for limit in limits:
                run = _Run(model, int(room * limit), self, problem.seed)
                if run.finish():
                    yield np.array(run.codes, np.int32)

        return quickest_eviction(self.name, problem, sequences, partial(sequences, limits=_LIMITS[:1]))


class _Run:
    """One run of the program within a limit. ``codes`` is the encoded sequence."""

    def __init__(self, model: CompactGraph, room: int, options: Dtr, seed: int) -> None:
        self.model = model
        self.room = room
        self.reads = rows(model.reads_start, model.reads)
        self.owns = rows(model.owns_start, model.owns)
        self.base = model.storage_node.tolist()
        self.codes: list[int] = []
        self.left = np.diff(model.uses_start).tolist()  # uses that the program still has for a storage
        self.pool = Pool(heuristic=options.heuristic, sample=options.sample, skip_small=options.sample, seed=seed)
        self.entries: list[Entry] = []
        for storage, node in enumerate(self.base):
            size, cost_ns = int(model.storage_bytes[storage]), int(model.time_ns[node])
            self.entries.append(Entry(size, cost_ns, tuple(self.entries[parent] for parent in self.reads[node])))
            self.entries[-1].pinned = bool(model.held[storage]) or not model.recomputable[node]

    def finish(self) -> bool:
        """Run the program to its end. Returns false if it thrashes."""
        most = _STEPS_PER_NODE * (self.model.nodes + 1)
        for node in range(self.model.nodes + 1):
            self._compute_with_inputs(node, most)
            if len(self.codes) > most:
                return False
            for storage in {*self.reads[node], *self.owns[node]}:
                self.left[storage] -= storage in self.reads[node]
                self._release(storage)
        return True

    def _compute_with_inputs(self, node: int, most: int) -> None:
        """Compute the node after recomputing its evicted inputs, recursively."""
        stack = [node]
        self._lock(node, 1)
        while stack and len(self.codes) <= most:
            top = stack[-1]
            missing = [self.base[s] for s in self.reads[top] if not self.entries[s].resident]
            if missing:
                stack.append(max(missing))
                self._lock(stack[-1], 1)
                continue
            self._compute(top, again=len(stack) > 1)
            self._lock(top, -1)
            stack.pop()
            for storage in (*self.reads[top], *self.owns[top]) if stack else ():
                self._release(storage)

    def _compute(self, node: int, again: bool) -> None:
        pool = self.pool
        owned = [self.entries[storage] for storage in self.owns[node]]
        need = int(self.model.workspace_bytes[node]) + sum(entry.bytes for entry in owned)
        fresh = [entry for entry in owned if not entry.resident]
        while pool.bytes + need > self.room:
            victim = pool.victim()
            if victim is None:
                break
            pool.evict(victim)
        self.codes.append(~node if again else node)
        pool.tick(int(self.model.time_ns[node]))
        for entry in fresh:
            pool.enter(entry)
        for storage in self.reads[node]:
            pool.touch(self.entries[storage])

    def _lock(self, node: int, change: int) -> None:
        for storage in self.reads[node]:
            self.entries[storage].locks += change

    def _release(self, storage: int) -> None:
        """Release the storage if the program does not use it again, unless it is pinned."""
        entry = self.entries[storage]
        if self.left[storage] == 0 and entry.locks == 0 and not entry.pinned and entry.resident:
            self.pool.evict(entry)

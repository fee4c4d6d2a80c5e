"""The runs that ``auto`` and ``minimum_peak`` are made of, over one compact model.

Starting points: the program as written, greedy eviction, nested segment checkpointing. Runs: hot annealing, which
forgets where it started; warm annealing, which keeps the outline; polishing; lowering the peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lowtide.ir import Costs, Graph, Schedule, schedule_from_sequence
from lowtide.solve.anneal import Found, Settings, search
from lowtide.solve.classes import node_classes
from lowtide.solve.compact import Compact, Indices, compact
from lowtide.solve.greedy import greedy_sequences
from lowtide.solve.segments import segment_sequences
from lowtide.solve.sweep import make_scratch, sweep
from lowtide.solve.tables import Tables, decode, encode_keep_all, make_tables


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A sequence and what the compact model says of it; ``peak_bytes`` includes ``fixed_bytes``."""

    codes: Indices
    recompute_ns: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Portfolio:
    """One problem's model with everything that the runs share."""

    graph: Graph
    model: Compact
    tables: Tables
    classes: Indices
    seed: int

    @property
    def mean_ns(self) -> float:
        """Mean time of a node, the unit of temperatures."""
        return max(float(self.model.time_ns.sum()) / max(self.model.nodes, 1), 1.0)

    @property
    def iterations(self) -> int:
        """Of all runs together at default effort; a step of a run costs time in proportion to the nodes."""
        nodes = max(self.model.nodes, 1)
        return int(min(14_000.0 * nodes, 7e9 / nodes**1.25))

    def schedule(self, candidate: Candidate) -> Schedule:
        return schedule_from_sequence(self.graph, decode(self.model, candidate.codes))

    def schedule_of(self, nodes: Iterable[int]) -> Schedule:
        return schedule_from_sequence(self.graph, self.model.sequence(nodes))

    def measure(self, sequences: Iterable[Indices]) -> list[Candidate]:
        """Each sequence swept once, unused recomputes dropped."""
        return [self._measure_one(codes) for codes in sequences]

    def _measure_one(self, codes: Indices) -> Candidate:
        source, target = codes.copy(), codes.copy()
        scratch = make_scratch(self.tables, len(codes), 0)
        swept = sweep(self.tables, scratch, source, 0, target, 0, 0, 2**62, np.inf, 0.0, 0.0, 1.0)
        return Candidate(target[swept.start :], swept.recompute_ns, swept.peak_bytes + self.model.fixed_bytes)

    def keep_all(self) -> Candidate:
        return self._measure_one(encode_keep_all(self.model))

    def greedy(self, budget_bytes: int) -> list[Candidate]:
        return self.measure(greedy_sequences(self.model, self.tables, budget_bytes))

    def segments(self) -> list[Candidate]:
        return self.measure(segment_sequences(self.model))

    def anneal(
        self, start: Candidate, budget_bytes: int, iterations: int, stream: int, hot: float, cold: float = 0.01
    ) -> Candidate | None:
        """The quickest within the budget that a run meets; temperatures in mean node times. ``None``: none met."""
        room = max(budget_bytes - self.model.fixed_bytes, 1)
        settings = Settings(
            budget_bytes=room,
            iterations=iterations,
            hot=hot * self.mean_ns,
            cold=cold * self.mean_ns,
            pressure=float(self.model.time_ns.sum() + 1) / room,
        )
        return self._candidate(search(self.tables, self.classes, start.codes, settings, self.seed * 64 + stream))

    def lower(self, start: Candidate, target_bytes: int, iterations: int, stream: int) -> Candidate:
        """The lowest peak that a run meets, which ends early at ``target_bytes``."""
        room = max(start.peak_bytes - self.model.fixed_bytes, 1)
        settings = Settings(
            budget_bytes=room,
            iterations=iterations,
            hot=0.1 * self.mean_ns,
            cold=0.01 * self.mean_ns,
            pressure=float(self.model.time_ns.sum() + 1) / room,
            time_weight=0.002,
            lower=0.001,
            target_bytes=max(target_bytes - self.model.fixed_bytes, 0),
            rate=1.0,
        )
        found = self._candidate(search(self.tables, self.classes, start.codes, settings, self.seed * 64 + stream))
        return start if found is None or found.peak_bytes > start.peak_bytes else found

    def _candidate(self, found: Found) -> Candidate | None:
        if len(found.codes) == 0:
            return None
        return Candidate(found.codes, found.recompute_ns, found.peak_bytes + self.model.fixed_bytes)


def make_portfolio(graph: Graph, costs: Costs, seed: int) -> Portfolio:
    model = compact(graph, costs)
    return Portfolio(graph, model, make_tables(model), node_classes(model), seed)

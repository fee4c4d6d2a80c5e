"""The runs that ``auto`` and ``minimum_peak`` are made of, over one compact model.

Starting points: the program as written, greedy eviction, nested segment checkpointing, the block programs. Runs: hot
annealing, which forgets where it started; warm annealing, which keeps the outline; lowering the peak. Runs of one round
go to two threads (kernels hold no lock of the interpreter); their results are taken in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.ir import Costs, Graph, Schedule, schedule_from_sequence
from lowtide.solve.blocks.answer import table_sequences
from lowtide.solve.blocks.book import Book
from lowtide.solve.blocks.seeds import block_sequences
from lowtide.solve.greedy import greedy_sequences
from lowtide.solve.model.classes import Classes, group, node_classes
from lowtide.solve.model.compact import Compact, Indices, bounding_model, compact
from lowtide.solve.model.sweep import sweep
from lowtide.solve.model.tables import Tables, decode, encode_keep_all, make_tables
from lowtide.solve.rockmate import Rockmate
from lowtide.solve.search.anneal import Found, Settings, search
from lowtide.solve.search.segments import segment_sequences
from lowtide.solve.search.threads import in_threads

_STREAMS = 1024  # of random numbers per seed
_MANY_NODES = 4000  # from which on the iterations grow more slowly than the program
_COLD = 0.01  # last temperature, in mean node times


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A sequence and what the compact model says of it; ``peak_bytes`` includes ``fixed_bytes``."""

    codes: Indices
    recompute_ns: int
    peak_bytes: int


class Run(NamedTuple):
    """An annealing run: where it starts, its stream of random numbers, its first temperature in mean node times."""

    start: Candidate
    stream: int
    hot: float


@dataclass(frozen=True, slots=True, eq=False)
class Portfolio:
    """One problem's model with everything that the runs share."""

    graph: Graph
    model: Compact
    floor: Compact  # for bounds
    tables: Tables
    classes: Classes
    book: Book
    seed: int

    @property
    def mean_ns(self) -> float:
        """Mean time of a node, the unit of temperatures."""
        return max(float(self.model.time_ns.sum()) / max(self.model.nodes, 1), 1.0)

    @property
    def iterations(self) -> int:
        """Of one run at default effort: one iteration takes 1 to 10 microseconds, more in longer programs."""
        nodes = max(self.model.nodes, 1)
        least = 30.0 * min(nodes, (_MANY_NODES * nodes) ** 0.5)
        return int(max(min(20.0 * nodes**2, 2.4e10 / nodes**1.6), least))

    def schedule(self, candidate: Candidate) -> Schedule:
        return schedule_from_sequence(self.graph, decode(self.model, candidate.codes))

    def schedule_of(self, nodes: Iterable[int]) -> Schedule:
        return schedule_from_sequence(self.graph, self.model.sequence(nodes))

    def measure(self, sequences: Iterable[Indices]) -> list[Candidate]:
        """Each sequence swept once, unused recomputes dropped."""
        return [self._measure_one(codes) for codes in sequences]

    def _measure_one(self, codes: Indices) -> Candidate:
        swept = sweep(self.tables, codes)
        return Candidate(swept.codes, swept.recompute_ns, swept.peak_bytes + self.model.fixed_bytes)

    def keep_all(self) -> Candidate:
        return self._measure_one(encode_keep_all(self.model))

    def greedy(self, budget_bytes: int) -> list[Candidate]:
        return self.measure(greedy_sequences(self.model, self.tables, budget_bytes))

    def segments(self) -> list[Candidate]:
        return self.measure(segment_sequences(self.model))

    def blocks(self, budget_bytes: int) -> list[Candidate]:
        return self.measure(block_sequences(self.book, budget_bytes))

    def tables_of_rockmate(self) -> list[Candidate]:
        """Everything that ``rockmate`` chooses from, whatever the budget."""
        top = self.keep_all().peak_bytes - self.model.fixed_bytes
        return self.measure(table_sequences(Rockmate().builders(self.book), top))

    def time_ns(self, candidate: Candidate) -> int:
        """Of the whole schedule."""
        return self.least_ns + candidate.recompute_ns

    @property
    def least_ns(self) -> int:
        """Of the program without recomputes and views."""
        return int(self.model.time_ns.sum()) + self.model.constant_ns

    def round(self, runs: Iterable[Run], budget_bytes: int, iterations: int, bound_ns: int) -> list[Candidate]:
        """The results of several annealing runs, in their order; those that met nothing left out.

        A run ends when it meets ``bound_ns``, which no schedule undercuts.
        """

        def anneal(run: Run) -> Candidate | None:
            return self.anneal(run.start, budget_bytes, iterations, run.stream, run.hot, bound_ns)

        return [candidate for candidate in in_threads(anneal, runs) if candidate is not None]

    def anneal(
        self, start: Candidate, budget_bytes: int, iterations: int, stream: int, hot: float, bound_ns: int = 0
    ) -> Candidate | None:
        """The quickest within the budget that a run meets; temperature in mean node times. ``None``: none met."""
        room = max(budget_bytes - self.model.fixed_bytes, 1)
        settings = Settings(
            budget_bytes=room,
            iterations=iterations,
            hot=hot * self.mean_ns,
            cold=_COLD * self.mean_ns,
            pressure=float(self.model.time_ns.sum() + 1) / room,
            target_ns=bound_ns - self.least_ns,
        )
        return self._candidate(search(self.tables, self.classes, start.codes, settings, self.seed * _STREAMS + stream))

    def lower(self, start: Candidate, target_bytes: int, iterations: int, stream: int) -> Candidate:
        """The lowest peak that a run meets, which ends early at ``target_bytes``."""
        room = max(start.peak_bytes - self.model.fixed_bytes, 1)
        settings = Settings(
            budget_bytes=room,
            iterations=iterations,
            hot=0.1 * self.mean_ns,
            cold=_COLD * self.mean_ns,
            pressure=float(self.model.time_ns.sum() + 1) / room,
            time_weight=0.002,
            lower=0.001,
            target_bytes=max(target_bytes - self.model.fixed_bytes, 0),
            rate=1.0,
        )
        found = self._candidate(search(self.tables, self.classes, start.codes, settings, self.seed * _STREAMS + stream))
        return start if found is None or found.peak_bytes > start.peak_bytes else found

    def _candidate(self, found: Found) -> Candidate | None:
        if len(found.codes) == 0:
            return None
        return Candidate(found.codes, found.recompute_ns, found.peak_bytes + self.model.fixed_bytes)


def make_portfolio(graph: Graph, costs: Costs, seed: int) -> Portfolio:
    model = compact(graph, costs)
    floor = bounding_model(graph, costs, model)
    tables = make_tables(model)
    return Portfolio(graph, model, floor, tables, group(node_classes(model)), Book(model, tables), seed)

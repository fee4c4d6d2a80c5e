"""The starting points and annealing runs of ``auto`` and ``minimum_peak``, over one compact model.

Starting points: the program without recomputation, greedy eviction, nested segment checkpointing, the block programs. Runs:
hot annealing, which forgets its start; warm annealing, which keeps its outline; lowering the peak. The runs of a round are
spread over all cores (kernels release the interpreter's lock); their results are taken in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lowtide.ir import Compute, Costs, Graph, Schedule, schedule_from_sequence
from lowtide.native import core
from lowtide.solve.block_programs import Rockmate
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.sequences import block_sequences, table_sequences
from lowtide.solve.greedy import greedy_sequences
from lowtide.solve.model.classes import Classes, node_classes
from lowtide.solve.model.compact import (
    CompactGraph,
    Indices,
    bounding_model,
    compact,
    decode,
    encode,
    encode_keep_all,
    released_model,
)
from lowtide.solve.model.sweep import Candidate, sweep
from lowtide.solve.search.anneal import AnnealSettings, make_state
from lowtide.solve.search.memory_paths import affordable
from lowtide.solve.search.segments import segment_sequences
from lowtide.solve.threads import in_threads

_STREAMS = 1024  # random streams per seed
_MANY_NODES = 4000  # above, the iterations grow more slowly than the program
_STRICT = 1000.0  # factor on the pressure of strict runs: more than a move over the budget could save
_COLD = 0.01  # last temperature, in mean node times
_SOME = 16  # sequences of block programs that are handed on together
_BRIEF_ITERATIONS = 200  # of a run, so that a round takes a millisecond or two


class AnnealRun(NamedTuple):
    """An annealing run: its start, random stream and first temperature (in mean node times). ``strict``: once within the budget
    it stays there, for budgets so small that oscillating about them finds nothing."""

    start: Candidate
    stream: int
    hot: float
    strict: bool = False


@dataclass(frozen=True, eq=False)
class Portfolio:
    """The model of one problem, with all that the runs share. Peaks of its candidates include ``fixed_bytes``."""

    graph: Graph
    costs: Costs
    model: CompactGraph
    classes: Classes
    seed: int
    released: bool  # forward outputs may be recomputed before the hand-over
    known: dict[int | None, list[Candidate]] = field(default_factory=dict)  # block programs that have run, by budget

    @cached_property
    def exact(self) -> CompactGraph:
        return released_model(self.graph, self.costs, self.model) if affordable(self.model) else self.model

    @cached_property
    def floor(self) -> CompactGraph:
        return bounding_model(self.graph, self.costs, self.model)

    @cached_property
    def chains(self) -> BlockChains:
        """The chains of blocks that the model is cut into."""
        return BlockChains(self.model)

    def with_times(self, costs: Costs) -> Portfolio:
        """Return a portfolio of the same graph, whose operators other than views have the times of ``costs``."""
        times = np.append(costs.time_ns[self.model.op_of_node], 0)
        return replace(self, costs=costs, model=self.model._replace(time_ns=times), known={})

    @property
    def mean_ns(self) -> float:
        """Mean time of a node, the unit of temperatures."""
        return max(float(self.model.time_ns.sum()) / max(self.model.nodes, 1), 1.0)

    @property
    def iterations(self) -> int:
        """Iterations of one run at default effort. An iteration takes 1 to 10 microseconds, more in longer programs."""
        nodes = max(self.model.nodes, 1)
        least = 30.0 * min(nodes, (_MANY_NODES * nodes) ** 0.5)
        return int(max(min(20.0 * nodes**2, 2.4e10 / nodes**1.6), least))

    def schedule(self, candidate: Candidate) -> Schedule:
        return schedule_from_sequence(self.graph, decode(self.model, candidate.codes), released=self.released)

    def schedule_of(self, nodes: Iterable[int]) -> Schedule:
        """Return the schedule of nodes that an exact search found."""
        return schedule_from_sequence(self.graph, self.exact.sequence(nodes), released=True)

    def of_schedule(self, schedule: Schedule) -> Candidate:
        """Return the candidate with the computes of ``schedule``, in the same order."""
        return self.measure([encode(self.model, (step.op for step in schedule.steps if isinstance(step, Compute)))])[0]

    def measure(self, sequences: Iterable[Indices]) -> list[Candidate]:
        """Sweep each sequence once: measure it and drop unused recomputes."""
        return [self._with_fixed(sweep(self.model, codes)) for codes in sequences]

    def _with_fixed(self, found: Candidate) -> Candidate:
        return found._replace(peak_bytes=found.peak_bytes + self.model.fixed_bytes)

    def keep_all(self) -> Candidate:
        return self.measure([encode_keep_all(self.model)])[0]

    def greedy(self, budget_bytes: int) -> list[Candidate]:
        return self.measure(greedy_sequences(self.model, budget_bytes))

    def segments(self) -> list[Candidate]:
        return self.measure(segment_sequences(self.model))

    def blocks(
        self, budget_bytes: int, on_some: Callable[[list[Candidate]], None] = lambda some: None
    ) -> list[Candidate]:
        """Return the results of the block programs around a budget; ``on_some`` is called with a few of them at a time."""
        if budget_bytes not in self.known:
            found: list[Candidate] = []
            waiting = block_sequences(self.chains, budget_bytes)
            while some := self.measure(itertools.islice(waiting, _SOME)):
                found += some
                on_some(some)
            self.known[budget_bytes] = found
        return self.known[budget_bytes]

    def tables_of_rockmate(self) -> list[Candidate]:
        """Return all candidates of ``rockmate``, which do not depend on the budget."""
        if None not in self.known:
            top = self.keep_all().peak_bytes - self.model.fixed_bytes
            self.known[None] = self.measure(table_sequences(Rockmate().builders(self.chains), top))
        return self.known[None]

    def time_ns(self, candidate: Candidate) -> int:
        """Return the time of the candidate's whole schedule."""
        return self.model.least_ns + candidate.recompute_ns

    def round(self, runs: Iterable[AnnealRun], budget_bytes: int, iterations: int, bound_ns: int) -> list[Candidate]:
        """Run several annealing runs. Returns the quickest sequence within the budget of each run, in their order, without runs
        that met none. A run ends when it meets ``bound_ns``, a lower bound on the time."""

        def anneal(run: AnnealRun) -> Candidate | None:
            settings = self._settings(budget_bytes, iterations, run.hot)
            settings = settings._replace(target_ns=bound_ns - self.model.least_ns)
            if run.strict:
                settings = settings._replace(pressure=_STRICT * settings.pressure, rate=1.0)
            return self._run(run.start, settings, run.stream)

        found = in_threads(anneal, runs, brief=iterations <= _BRIEF_ITERATIONS)
        return [candidate for candidate in found if candidate is not None]

    def lower(self, run: AnnealRun, target_bytes: int, iterations: int) -> Candidate:
        """Run an annealing run that minimises the peak and ends at ``target_bytes``. Returns its lowest sequence."""
        start = run.start
        settings = self._settings(start.peak_bytes, iterations, run.hot)
        target_bytes = max(target_bytes - self.model.fixed_bytes, 0)
        settings = settings._replace(time_weight=0.002, lower=0.001, target_bytes=target_bytes, rate=1.0)
        found = self._run(start, settings, run.stream)
        return start if found is None or found.peak_bytes > start.peak_bytes else found

    def _settings(self, budget_bytes: int, iterations: int, hot: float) -> AnnealSettings:
        """``hot``: the first temperature in mean node times."""
        room = max(budget_bytes - self.model.fixed_bytes, 1)
        pressure = float(self.model.time_ns.sum() + 1) / room
        return AnnealSettings(room, iterations, hot * self.mean_ns, _COLD * self.mean_ns, pressure)

    def _run(self, start: Candidate, settings: AnnealSettings, stream: int) -> Candidate | None:
        """Anneal: the quickest sequence met (the lowest, with ``lower``), or ``None`` if none was within the (last) budget."""
        random = make_state(self.seed * _STREAMS + stream)
        found = Candidate(*core.anneal(self.model, self.classes, start.codes, settings, random))
        return self._with_fixed(found) if len(found.codes) else None


def make_portfolio(graph: Graph, costs: Costs, seed: int, *, released: bool = False) -> Portfolio:
    """Make the portfolio of a problem. ``released``: allow freeing and recomputing forward outputs before the hand-over."""
    model = compact(graph, costs, present=released)
    return Portfolio(graph, costs, model, node_classes(model), seed, released)

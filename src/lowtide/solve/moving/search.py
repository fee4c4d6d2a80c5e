"""Which storages move: searches over compute sequences of split graphs, priced and picked by the exact clock.

A search knows no clock, so a transfer has a price: a share of the time that it takes back. What competes with computing again
is chosen by a *ratio*: storages whose operator takes at least so many times the transfer may move, the others may be computed
again. For each pair of a ratio and a share a quick search answers; its transfers are placed and its schedule is simulated. The
best pairs are refined around themselves, and searched again with more patience.

The lower bound follows from two clocks. A schedule takes as long as its operators, and as long as its transfers back, so for
every weight w between 0 and 1 at least ``(1 - w) computing + w fetching``: the time of a split graph in which recomputing costs
``1 - w`` of its time, fetching ``w`` of its, and a storage that could come back either way the less of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.ir import Costs, Graph, Schedule, SecondMemory, simulate
from lowtide.solve.bounds import INFEASIBLE_NS, prove_time, proven_infeasible
from lowtide.solve.model.compact import compact
from lowtide.solve.model.split import Split, movable_storages, split, split_for_nothing
from lowtide.solve.moving.placing import place_transfers
from lowtide.solve.outcome import answer, least_time_ns
from lowtide.solve.portfolio_search import search_sequences
from lowtide.solve.problem import Problem, Solution, Status
from lowtide.solve.search.portfolio import make_portfolio

Pair = tuple[float, float]  # a ratio and a share

_FIRST: tuple[Pair, ...] = tuple((ratio, share) for ratio in (0.0, 0.1, 0.3, 1.0, 3.0) for share in (0.02, 0.3))
_QUICK: tuple[Pair, ...] = ((0.0, 0.02), (0.3, 0.02), (1.0, 0.3))  # for a plan at once
_STEPS = (1.5, 3.0)  # by how much a pair is changed in a round of refinement, the last round first
_ROUNDS = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6}  # by effort
_PATIENT = {0: 0, 1: 1, 2: 1, 3: 2, 4: 3, 5: 4}  # how many pairs are searched again
_FAILURES = 2  # searches in vain, from the most that may move on, until the others are not tried
_CLOSE = 2000  # a schedule within one part in so many of the program's time is good enough
_WEIGHTS = (0.1, 0.3, 0.5, 0.7)  # of the clocks


@dataclass(slots=True)
class _Moves:
    """The problem, what is known of its storages, and what has been tried."""

    problem: Problem
    memory: SecondMemory
    moves_only: bool
    sizes: Mapping[int, int]
    fetch_ns: Mapping[int, int]
    ratios: Mapping[int, float]  # storage -> its operator's time in those of its fetch
    found: dict[tuple[Pair, int], tuple[int, Schedule]] = field(default_factory=dict)  # by pair and effort
    lowest: tuple[int, Schedule] | None = None  # of those over the budget
    failures: int = 0  # searches that found nothing within it

    @classmethod
    def of(cls, problem: Problem, memory: SecondMemory, moves_only: bool) -> _Moves:
        graph, costs = problem.graph, problem.costs
        sizes = {storage: int(costs.storage_bytes[storage]) for storage in movable_storages(graph, costs)}
        fetch_ns = {storage: max(memory.fetch_ns(size), 1) for storage, size in sizes.items()}
        ratios = {}
        for storage in sizes:
            base = graph.storages[storage].base
            again = base is not None and graph.ops[base].recomputable and not moves_only
            ratios[storage] = int(costs.time_ns[base]) / fetch_ns[storage] if again else float("inf")
        return cls(problem, memory, moves_only, sizes, fetch_ns, ratios)

    def prices(self, pair: Pair) -> dict[int, int]:
        """Of the storages that may move, by what moving them saves, as many as the second memory holds."""
        ratio, share = (0.0 if self.moves_only else pair[0]), pair[1]
        room = self.memory.capacity_bytes
        prices: dict[int, int] = {}
        for storage in sorted(self.sizes, key=lambda one: (-self.ratios[one], one)):
            if self.ratios[storage] < ratio:
                break
            if room is not None:
                if self.sizes[storage] > room:
                    continue
                room -= self.sizes[storage]
            prices[storage] = int(share * self.fetch_ns[storage]) + 1
        return prices

    def attempt(self, pair: Pair, effort: int = 0) -> None:
        """Search for a schedule in which the pair decides what moves."""
        problem = self.problem
        prices = self.prices(pair)
        hopeless = not self.found and self.failures >= _FAILURES
        if (pair, effort) in self.found or not prices or hopeless:
            return
        parts = split(problem.graph, problem.costs, prices, moves_only=self.moves_only)
        inner = replace(problem, graph=parts.graph, costs=parts.costs, on_progress=None, on_better=None)
        portfolio = make_portfolio(parts.graph, parts.costs, problem.seed)
        solution = search_sequences(inner, portfolio, effort, prove=False)
        if solution.schedule is None:
            self.failures += 1
            self._note_lowest(parts, solution)
            return
        schedule = parts.schedule(solution.schedule)
        placed = place_transfers(problem.graph, problem.costs, schedule, problem.budget_bytes)
        run = simulate(problem.graph, problem.costs, placed)
        if run.peak_bytes > problem.budget_bytes:
            return
        before = min((time_ns for time_ns, _ in self.found.values()), default=INFEASIBLE_NS)
        self.found[pair, effort] = (run.time_ns, placed)
        if run.time_ns < before:
            problem.better(run.time_ns, lambda: answer("auto", problem, [placed]))

    def _note_lowest(self, parts: Split, solution: Solution) -> None:
        if solution.lowest_schedule is not None:
            schedule = parts.schedule(solution.lowest_schedule)
            peak = simulate(self.problem.graph, self.problem.costs, schedule).peak_bytes
            if self.lowest is None or peak < self.lowest[0]:
                self.lowest = (peak, schedule)

    def best(self, count: int) -> list[Pair]:
        """The pairs of the quickest schedules."""
        pairs = dict.fromkeys(pair for (pair, _), _ in sorted(self.found.items(), key=lambda item: item[1][0]))
        return list(pairs)[:count]

    def ranked(self) -> list[Schedule]:
        """The schedules within the budget, the quickest first; without one, the lowest."""
        found = [schedule for _, schedule in sorted(self.found.values(), key=lambda item: item[0])]
        return found or ([] if self.lowest is None else [self.lowest[1]])


def moving_schedules(problem: Problem, effort: int, *, moves_only: bool = False) -> list[Schedule]:
    """Schedules with transfers, the quickest first; where none is within the budget, the lowest. Empty where nothing may
    move."""
    memory = problem.costs.second_memory
    if memory is None:
        return []
    moves = _Moves.of(problem, memory, moves_only)
    least = least_time_ns(problem)
    rounds: list[Callable[[], Iterable[tuple[Pair, int]]]] = [
        lambda: ((pair, 0) for pair in (_FIRST if effort else _QUICK))
    ]
    rounds += [_around(moves, _STEPS[number % len(_STEPS)]) for number in range(_ROUNDS[effort], 0, -1)]
    rounds += [lambda: ((pair, effort) for pair in moves.best(_PATIENT[effort]))]
    for number, attempts in enumerate(rounds):
        problem.progress("transfers", number / len(rounds))
        for pair, patience in list(attempts()):
            moves.attempt(pair, patience)
            if moves.found and min(time_ns for time_ns, _ in moves.found.values()) <= least + least // _CLOSE:
                return moves.ranked()
    return moves.ranked()


def _around(moves: _Moves, step: float) -> Callable[[], Iterable[tuple[Pair, int]]]:
    """Pairs next to the best."""

    def attempts() -> Iterable[tuple[Pair, int]]:
        for ratio, share in moves.best(1):
            yield (ratio * step if ratio else 0.05, share), 0
            yield (ratio / step, share), 0
            yield (ratio, share * step), 0
            yield (ratio, share / step), 0

    return attempts


def bounded(problem: Problem, solution: Solution, effort: int) -> Solution:
    """``solution`` with a bound that holds for all schedules, whatever they move."""
    least = least_time_ns(problem)
    if not solution.status.solved:
        parts = split_for_nothing(problem.graph, problem.costs)
        proven = proven_infeasible(compact(parts.graph, parts.costs, floor=True), problem.budget_bytes)
        return replace(solution, status=Status.INFEASIBLE) if proven else solution
    bound = least
    if effort > 1 and solution.time_ns > least:
        bound = max(bound, moving_bound(problem, min(effort - 1, 3), solution.time_ns))
    status = Status.OPTIMAL if solution.time_ns <= bound else Status.FEASIBLE
    return replace(solution, status=status, lower_bound_ns=min(bound, solution.time_ns))


def moving_bound(problem: Problem, effort: int, known_ns: int | None = None) -> int:
    """Nanoseconds that no schedule within the budget undercuts, whatever it moves; see the module's docstring."""
    graph, costs = problem.graph, problem.costs
    if costs.second_memory is None:
        raise ValueError("there is no second memory to move to")
    found = 0
    for weight in _WEIGHTS:
        parts = _weighted(graph, costs, costs.second_memory, weight)
        model = compact(parts.graph, parts.costs, floor=True)
        known = None if known_ns is None else known_ns + parts.first_ns
        bound = prove_time(model, problem.budget_bytes, effort=effort, known_ns=known).ns
        found = max(found, min(bound - parts.first_ns, INFEASIBLE_NS))
    return found


def _weighted(graph: Graph, costs: Costs, memory: SecondMemory, weight: float) -> Split:
    """The split graph on whose times the weighted sum of both clocks is bounded. An operator that runs again brings all of
    its storages back, so each has its part of the operator's time."""
    movable = movable_storages(graph, costs)
    whole: dict[int, int] = {}
    for storage in movable:
        base = graph.storages[storage].base
        assert base is not None
        whole[base] = whole.get(base, 0) + int(costs.storage_bytes[storage])
    prices = {}
    for storage in movable:
        base = graph.storages[storage].base
        assert base is not None
        fetch_ns = weight * memory.fetch_ns(int(costs.storage_bytes[storage]))
        part = int(costs.storage_bytes[storage]) / whole[base]
        again_ns = (1 - weight) * part * int(costs.time_ns[base]) if graph.ops[base].recomputable else fetch_ns
        prices[storage] = int(min(fetch_ns, again_ns))
    scaled = np.floor((1 - weight) * costs.time_ns).astype(np.int64)
    return split(graph, replace(costs, time_ns=scaled), prices, floor=True)

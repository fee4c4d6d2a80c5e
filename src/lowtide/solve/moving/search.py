"""Which storages move: searches over compute sequences of split graphs, priced and picked by the exact clock.

A search knows no clock, so a transfer has a price: a share of the time that it takes back. What competes with computing again
is chosen by a *ratio*: storages whose operator takes at least so many times the transfer may move, the others may be computed
again. For each pair of a ratio and a share a quick search answers; its transfers are placed and its schedule is simulated.

Starting points are the dynamic programs over blocks with transfers (``lowtide.solve.moving.chains``), that of ``pofo`` among
them, and the best that moves nothing. Searches go on from these with a ladder of pairs, then from the quickest so far with
pairs around that of its own, the last with more patience.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from lowtide.ir import Fetch, Schedule, SecondMemory, simulate
from lowtide.solve.block_programs import Rotor
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.bounds import INFEASIBLE_NS
from lowtide.solve.model.compact import compact
from lowtide.solve.model.split import Split, movable_storages, split
from lowtide.solve.moving.chains import chain_schedules, menu_builders, pofo_builders
from lowtide.solve.moving.placing import place_transfers
from lowtide.solve.outcome import answer, least_time_ns
from lowtide.solve.portfolio_search import search_sequences
from lowtide.solve.problem import Problem, Solution
from lowtide.solve.search.exact import affordable, shortest
from lowtide.solve.search.portfolio import make_portfolio

Pair = tuple[float, float]  # a ratio and a share

_QUICK: tuple[Pair, ...] = ((0.0, 0.02), (0.3, 0.02), (1.0, 0.3))  # to begin with
_LADDER: tuple[Pair, ...] = tuple((ratio, ratio * part) for ratio in (0.03, 0.1, 0.3, 1.0) for part in (1.0, 0.2))
_STEPS = (1.3, 2.0)  # by how much a pair is changed in a round of refinement, the last round first
_SHORT = _LADDER[2:6]
_STARTS = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6}  # of the programs over blocks, how many are searched from, by effort
_ROUNDS = {0: 0, 1: 1, 2: 4, 3: 8, 4: 14, 5: 24}  # by effort
_WARM = {0: 0, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}  # the effort of their searches
_PATIENT = {0: 0, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}  # how many pairs are searched with the whole effort
_CELLS = 12  # of the dynamic programs over blocks
_FAILURES = 2  # searches in vain, from the most that may move on, until the others are not tried
_CLOSE = 400  # a schedule within one part in so many of the program's time is good enough
_ALWAYS = 2  # but for the first rounds, up to the programs over blocks


class _Found(NamedTuple):
    """A schedule within the budget, and the pair that it was found by."""

    time_ns: int
    schedule: Schedule
    pair: Pair | None = None


@dataclass(slots=True)
class _Moves:
    """The problem, what is known of its storages, and what has been tried."""

    problem: Problem
    memory: SecondMemory
    moves_only: bool
    sizes: Mapping[int, int]
    fetch_ns: Mapping[int, int]
    ratios: Mapping[int, float]  # storage -> its operator's time in those of its fetch
    found: list[_Found] = field(default_factory=list)
    starts: list[_Found] = field(default_factory=list)
    tried: set[tuple[Pair, int, int]] = field(default_factory=set)
    lowest: tuple[int, Schedule] | None = None  # of those over the budget
    failures: int = 0  # searches that found nothing within it

    @classmethod
    def of(cls, problem: Problem, memory: SecondMemory, moves_only: bool) -> _Moves:
        graph, costs = problem.graph, problem.costs
        # What the backward pass writes over its inputs stays: moving it would take the place of both.
        over = {value for op in graph.ops[graph.forward_ops :] if op.overwrites for value in op.outputs}
        written = {graph.values[value].storage for value in over}
        sizes = {
            storage: int(costs.storage_bytes[storage])
            for storage in movable_storages(graph, costs)
            if storage not in written
        }
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
        order = sorted(self.sizes, key=lambda one: (-self.ratios[one], one))
        held = self.memory.held((one, self.sizes[one]) for one in order if self.ratios[one] >= ratio)
        return {storage: int(share * self.fetch_ns[storage]) + 1 for storage in held}

    def attempt(self, pair: Pair, effort: int = 0, start: Schedule | None = None) -> None:
        """Search for a schedule in which the pair decides what moves, from ``start`` where there is one."""
        problem, prices = self.problem, self.prices(pair)
        for step in start.steps if start is not None else ():
            if isinstance(step, Fetch):
                prices.setdefault(step.storage, int(pair[1] * self.fetch_ns[step.storage]) + 1)
        hopeless = not self.found and self.failures >= _FAILURES
        if (pair, effort, id(start)) in self.tried or not prices or hopeless:
            return
        self.tried.add((pair, effort, id(start)))
        parts = split(problem.graph, problem.costs, prices, moves_only=self.moves_only)
        inner = replace(problem, graph=parts.graph, costs=parts.costs, on_progress=None, on_better=None)
        solution = _searched(inner, effort, () if start is None else (parts.sequence(start),))
        if solution.schedule is None:
            self.failures += 1
            self._note_lowest(parts, solution)
            return
        schedule = parts.schedule(solution.schedule)
        self.note(place_transfers(problem.graph, problem.costs, schedule, problem.budget_bytes), pair)

    def note(self, schedule: Schedule, pair: Pair | None = None) -> _Found | None:
        """What it is, if it fits."""
        problem, room = self.problem, self.memory.capacity_bytes
        run = simulate(problem.graph, problem.costs, schedule)
        if run.peak_bytes > problem.budget_bytes or (room is not None and run.timing.second_peak_bytes > room):
            return None
        before, found = self.least_ns, _Found(run.time_ns, schedule, pair)
        self.found.append(found)
        if run.time_ns < before:
            problem.better(run.time_ns, lambda: answer("auto", problem, [schedule]))
        return found

    @property
    def least_ns(self) -> int:
        """The time of the quickest."""
        return min((each.time_ns for each in self.found), default=INFEASIBLE_NS)

    def _note_lowest(self, parts: Split, solution: Solution) -> None:
        if solution.lowest_schedule is not None:
            schedule = parts.schedule(solution.lowest_schedule)
            peak = simulate(self.problem.graph, self.problem.costs, schedule).peak_bytes
            if self.lowest is None or peak < self.lowest[0]:
                self.lowest = (peak, schedule)

    def best(self, count: int) -> list[Pair]:
        """The pairs of the quickest schedules."""
        pairs = [each.pair for each in _ranked(self.found) if each.pair is not None]
        return [*dict.fromkeys(pairs)][:count]

    def start(self, place: int) -> Schedule | None:
        """The quickest to start from, or the one in that place after it; without any, the quickest."""
        starts = _ranked(self.starts)
        return starts[place].schedule if place < len(starts) else self.first

    @property
    def first(self) -> Schedule | None:
        """The quickest."""
        return min(self.found, key=_time).schedule if self.found else None

    def ranked(self) -> list[Schedule]:
        """The schedules within the budget, the quickest first; without one, the lowest."""
        found = [each.schedule for each in _ranked(self.found)]
        return found or ([] if self.lowest is None else [self.lowest[1]])


def _time(found: _Found) -> int:
    return found.time_ns


def _ranked(found: Iterable[_Found]) -> list[_Found]:
    """The quickest first, then that which was found first."""
    return sorted(found, key=_time)


def _searched(problem: Problem, effort: int, known: Iterable[Sequence[int]]) -> Solution:
    """The best of a split graph, exactly where it has a few nodes."""
    portfolio = make_portfolio(problem.graph, problem.costs, problem.seed)
    optimum = shortest(portfolio.exact, problem.budget_bytes) if affordable(portfolio.exact) else None
    if optimum is not None and optimum.feasible:
        return answer("auto", problem, [portfolio.schedule_of(optimum.nodes)])
    return search_sequences(problem, portfolio, effort, prove=False, known=known)


def moving_schedules(
    problem: Problem, effort: int, still: Callable[[], Schedule | None], *, moves_only: bool = False
) -> list[Schedule]:
    """Schedules with transfers, the quickest first; where none is within the budget, the lowest. Empty where nothing may
    move. ``still``: asked for a schedule within the budget that moves nothing, where one could be of use."""
    memory = problem.costs.second_memory
    if memory is None:
        return []
    moves = _Moves.of(problem, memory, moves_only)
    least = least_time_ns(problem)
    rounds = [*_rounds(moves, effort, still)]
    for number, round_of_attempts in enumerate(rounds):
        problem.progress("transfers", number / len(rounds))
        enough = least if number < _ALWAYS else least + least // _CLOSE
        for attempt in round_of_attempts():
            attempt()
            if moves.least_ns <= enough:
                return moves.ranked()
    return moves.ranked()


Attempts = Callable[[], Iterable[Callable[[], None]]]


def _rounds(moves: _Moves, effort: int, still: Callable[[], Schedule | None]) -> Iterator[Attempts]:
    """What is tried one after the other, each round in the knowledge of those before."""
    yield lambda: (partial(moves.attempt, pair) for pair in _QUICK)
    if not moves.moves_only:
        yield lambda: _on_chains(moves, effort)
    if effort == 0:
        return
    ladder = _SHORT if effort == 1 else _LADDER
    for place in range(_STARTS[effort]):
        yield lambda place=place: _from(moves, moves.start(place), ladder, _WARM[effort])  # type: ignore[misc]
    if effort > 1:
        yield lambda: _from(moves, still(), ladder, _WARM[effort])
    for number in range(_ROUNDS[effort], 0, -1):
        step = _STEPS[number % len(_STEPS)]
        yield lambda step=step: _from(moves, moves.first, _around(moves.best(1), step), _WARM[effort])  # type: ignore[misc]
    yield lambda: _from(moves, moves.first, moves.best(_PATIENT[effort]), effort)


def _on_chains(moves: _Moves, effort: int) -> Iterator[Callable[[], None]]:
    """Those of the dynamic programs over blocks, and whatever ``rotor`` and ``pofo`` answer."""
    problem = moves.problem
    if effort:
        yield lambda: _note_all(moves, [one for one in (Rotor().solve(problem).schedule,) if one is not None])
    chains = BlockChains(compact(problem.graph, problem.costs))
    builders = menu_builders(chains)
    builders = builders if effort > 1 else builders[1:2]
    builders = [*builders, *(pofo_builders(chains) if effort else ())]
    for builder in builders:
        yield lambda builder=builder: _note_all(moves, chain_schedules(problem, [builder], _CELLS, moves.least_ns))  # type: ignore[misc]


def _note_all(moves: _Moves, schedules: Sequence[Schedule]) -> None:
    """The best of them is one to start from."""
    fitting = [found for schedule in schedules if (found := moves.note(schedule)) is not None]
    if fitting:
        moves.starts.append(min(fitting, key=_time))


def _from(moves: _Moves, start: Schedule | None, pairs: Iterable[Pair], effort: int) -> Iterator[Callable[[], None]]:
    """Searches from a schedule."""
    return (partial(moves.attempt, pair, effort, start) for pair in pairs)


def _around(pairs: Iterable[Pair], step: float) -> Iterator[Pair]:
    """Pairs next to these."""
    for ratio, share in pairs:
        yield ratio * step if ratio else 0.05, share
        yield ratio / step, share
        yield ratio, share * step
        yield ratio, share / step

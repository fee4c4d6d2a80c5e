"""Which storages move: searches over compute sequences of split graphs, judged by the exact clock.

A search has no clock, so three numbers decide for it what moves (``lowtide.solve.moving.choices``). For each choice of
them a quick search gives a sequence; its transfers are placed, and its schedule is timed by the clock.

The starting points are the dynamic programs over blocks with transfers (``lowtide.solve.moving.chains``), among them
that of ``pofo``, and the result of a quick search that moves nothing. Further searches start from these with a ladder
of choices, and then from the quickest schedule so far with choices around its own.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from lowtide.ir import Schedule, SecondMemory
from lowtide.solve.block_programs import Rotor
from lowtide.solve.bounds import INFEASIBLE_NS
from lowtide.solve.model.split import Split, movable_storages, split
from lowtide.solve.model.sweep import Candidate
from lowtide.solve.moving.chains import ChainPrograms, menu_builders
from lowtide.solve.moving.choices import LADDER, QUICK, SHORT, Choice, around
from lowtide.solve.moving.steps import Program, Run, Steps, decoded, encoded, place_steps, program_of, run_steps
from lowtide.solve.outcome import answer, least_time_ns
from lowtide.solve.portfolio_search import search_candidate
from lowtide.solve.problem import Problem
from lowtide.solve.search.memory_paths import affordable, shortest
from lowtide.solve.search.portfolio import Portfolio, make_portfolio

_STEPS = (1.3, 2.0)  # factors by which refinement changes a choice, the last round's first
_STARTS = {0: 0, 1: 1, 2: 1, 3: 1, 4: 3, 5: 6}  # starting points from the programs over blocks, by effort
_ROUNDS = {0: 0, 1: 1, 2: 4, 3: 10, 4: 16, 5: 24}  # by effort
_WARM = {0: 0, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}  # the effort of searches from these
_PATIENT = {0: 0, 1: 0, 2: 0, 3: 0, 4: 2, 5: 4}  # how many choices get the whole effort
_MODELS = 8  # split graphs that are kept for other prices of the same storages
_CELLS = 12  # of the dynamic programs over blocks
_PATIENCE = 8  # generations without anything better in a search
_FAR = 1.5  # no starting point above so many times the least overhead
_GAIN = 1000  # refinement ends if two rounds gain less than this part (1/n) of the program's time
_FAILURES = 2  # failed searches, from the choice that moves most, after which the others are not tried
_CLOSE = 400  # a schedule within this part (1/n) of the program's time is good enough
_ALWAYS = 2  # but for the first rounds, up to the programs over blocks
_OTHER_ROUNDS = 5  # than those of ``_STARTS`` and ``_ROUNDS``

Still = Callable[[int], Schedule | None]  # called with the time of the quickest known schedule
Attempts = Iterator[None]
"""Searches that are made while it is gone through, one at a step."""


class _Movable(NamedTuple):
    """A storage that may move. ``ratio``: the time of its operator divided by that of its fetch; infinite if the
    operator may not run again."""

    storage: int
    bytes: int
    fetch_ns: int
    ratio: float

    def price(self, choice: Choice) -> int:
        return int(choice.share * self.fetch_ns) + 1


class _Found(NamedTuple):
    """A schedule within the budget, and the choice with which it was found."""

    time_ns: int
    steps: Steps
    choice: Choice | None = None


class _Model(NamedTuple):
    """A split graph with its search."""

    parts: Split
    portfolio: Portfolio


_time_of = operator.attrgetter("time_ns")


@dataclass(slots=True)
class _Moves:
    """The problem, what is known of its storages, and what has been tried. ``found``, ``starts``: the quickest
    first."""

    problem: Problem
    memory: SecondMemory
    portfolio: Portfolio | None  # without, nothing is computed again
    program: Program
    movable: Mapping[int, _Movable]  # by storage, in the order in which they are made
    found: list[_Found] = field(default_factory=list)
    starts: list[_Found] = field(default_factory=list)
    tried: dict[tuple[Choice, int, int], Steps | None] = field(default_factory=dict)  # with where each started
    models: dict[frozenset[int], _Model] = field(default_factory=dict)  # by what may move
    lowest: tuple[int, Steps] | None = None  # the lowest over the budget
    marks: list[int] = field(default_factory=list)  # the time of the quickest when each round of refinement began
    failures: int = 0  # searches that found nothing within it

    @classmethod
    def of(cls, problem: Problem, memory: SecondMemory, portfolio: Portfolio | None) -> _Moves:
        graph, costs = problem.graph, problem.costs
        # What the backward pass writes over its inputs stays: moving it would take the place of both.
        over = (op for op in graph.ops[graph.forward_ops :] if op.overwrites)
        written = graph.storages_of(value for op in over for value in op.outputs)
        movable = []
        for storage in movable_storages(graph, costs):
            size, base = int(costs.storage_bytes[storage]), graph.storages[storage].base or 0
            fetch_ns = max(memory.fetch_ns(size), 1)
            again = graph.ops[base].recomputable and portfolio is not None
            ratio = int(costs.time_ns[base]) / fetch_ns if again else float("inf")
            if storage not in written:
                movable.append((base, _Movable(storage, size, fetch_ns, ratio)))
        made = {one.storage: one for _, one in sorted(movable)}
        return cls(problem, memory, portfolio, program_of(graph, costs), made)

    def prices(self, choice: Choice) -> dict[int, int]:
        """The prices of storages that may move, in the order in which they are made, as many as fit the second
        memory."""
        ratio, room = (0.0 if self.moves_only else choice.ratio), choice.limit * self.problem.costs.total_time_ns
        chosen = [one for one in self.movable.values() if one.ratio >= ratio]
        taken = itertools.accumulate(one.fetch_ns for one in chosen)
        within = (one for one, time_ns in zip(chosen, taken, strict=True) if time_ns <= room)
        held = self.memory.held((one.storage, one.bytes) for one in within)
        return {storage: self.movable[storage].price(choice) for storage in held}

    def search(self, choices: Iterable[Choice], effort: int, start: Steps | None = None) -> Attempts:
        """Search with each choice, from ``start`` if given."""
        for choice in choices:
            self.attempt(choice, effort, start)
            yield

    def attempt(self, choice: Choice, effort: int, start: Steps | None) -> None:
        """Search for a schedule in which the choice decides what moves, from ``start`` if given."""
        problem, prices = self.problem, self.prices(choice)
        for storage in start.fetched if start is not None else ():
            prices.setdefault(storage, self.movable[storage].price(choice))
        hopeless = not self.found and self.failures >= _FAILURES
        if (choice, effort, id(start)) in self.tried or not prices or hopeless:
            return
        self.tried[choice, effort, id(start)] = start
        parts, portfolio = self._model(prices)
        inner = replace(problem, graph=parts.graph, costs=parts.costs, on_progress=None, on_better=None)
        exact = _exactly(portfolio, problem.budget_bytes)
        if exact is not None:
            self.place(encoded(parts.schedule(exact)), choice)
            return
        known = () if start is None else (parts.sequence(decoded(start)),)
        found = search_candidate(inner, portfolio, effort, known, patience=_PATIENCE)
        if found.peak_bytes > problem.budget_bytes:
            self.failures += 1
            self._note_lowest(encoded(parts.schedule(portfolio.schedule(found))))
        elif _computing_ns(parts, portfolio, found) < self.least_ns:
            self.place(encoded(parts.schedule(portfolio.schedule(found))), choice)

    def _model(self, prices: Mapping[int, int]) -> _Model:
        """The model of the graph in which these storages may move, at their prices."""
        problem, moving = self.problem, frozenset(prices)
        known = self.models.pop(moving, None)
        if known is None:
            parts = split(problem.graph, problem.costs, prices, moves_only=self.moves_only)
            known = _Model(parts, make_portfolio(parts.graph, parts.costs, problem.seed))
        self.models[moving] = known
        if len(self.models) > _MODELS:
            del self.models[next(iter(self.models))]
        parts = known.parts.priced(prices)
        return _Model(parts, known.portfolio.with_times(parts.costs))

    def place(self, steps: Steps, choice: Choice | None = None) -> None:
        """Place the transfers of a sequence, and record the schedule."""
        self.note(*place_steps(self.program, steps, self.problem.budget_bytes), choice)

    def note(self, steps: Steps, run: Run, choice: Choice | None = None) -> _Found | None:
        """Record a schedule, if it fits."""
        problem, room = self.problem, self.memory.capacity_bytes
        if run.peak_bytes > problem.budget_bytes or (room is not None and run.second_peak_bytes > room):
            return None
        before, found = self.least_ns, _Found(run.time_ns, steps, choice)
        bisect.insort(self.found, found, key=_time_of)
        if run.time_ns < before:
            problem.better(run.time_ns, lambda: answer("auto", problem, [decoded(steps)]))
        return found

    @property
    def moves_only(self) -> bool:
        """Whether nothing is computed again."""
        return self.portfolio is None

    @property
    def least_ns(self) -> int:
        """The time of the quickest schedule."""
        return self.found[0].time_ns if self.found else INFEASIBLE_NS

    def _note_lowest(self, steps: Steps) -> None:
        peak = run_steps(self.program, steps).peak_bytes
        if self.lowest is None or peak < self.lowest[0]:
            self.lowest = (peak, steps)

    def best(self, count: int) -> list[Choice]:
        """The choices behind the quickest schedules."""
        choices = [each.choice for each in self.found if each.choice is not None]
        return [*dict.fromkeys(choices)][:count]

    def start(self, place: int) -> Steps | None:
        """The quickest schedule to start from, or the one ``place`` positions after it, but none that takes far longer
        than the quickest."""
        if place >= len(self.starts):
            return None
        start, least = self.starts[place], self.problem.costs.total_time_ns
        return start.steps if start.time_ns - least <= _FAR * (self.least_ns - least) else None

    @property
    def first(self) -> Steps | None:
        """The quickest schedule."""
        return self.found[0].steps if self.found else None

    @property
    def answer(self) -> Schedule | None:
        """The quickest schedule within the budget; without one, the lowest."""
        steps = self.first if self.found or self.lowest is None else self.lowest[1]
        return None if steps is None else decoded(steps)


def _exactly(portfolio: Portfolio, budget_bytes: int) -> Schedule | None:
    """The best schedule of a split graph with few nodes; ``None`` for larger ones, or if nothing fits."""
    optimum = shortest(portfolio.exact, budget_bytes) if affordable(portfolio.exact) else None
    return portfolio.schedule_of(optimum.nodes) if optimum is not None and optimum.found else None


def _computing_ns(parts: Split, portfolio: Portfolio, found: Candidate) -> int:
    """The time of a candidate's operators, which is the least that its schedule takes."""
    model = portfolio.model
    fetches = np.isin(model.op_of_node, [*parts.fetched])
    nodes = np.where(found.codes < 0, ~found.codes, found.codes)[:-1]
    return portfolio.time_ns(found) - int(model.time_ns[nodes[fetches[nodes]]].sum())


def moving_schedule(
    problem: Problem, effort: int, portfolio: Portfolio | None, still: Still = lambda _: None
) -> Schedule | None:
    """The quickest schedule with transfers that is found; if none is within the budget, the lowest; ``None`` if nothing
    may move.

    ``portfolio``: the problem's, to search what moves nothing; without it, nothing is computed again. ``still``: asked
    at the end for a quicker schedule that moves nothing, from which the search then continues.
    """
    memory = problem.costs.second_memory
    if memory is None:
        return None
    moves = _Moves.of(problem, memory, portfolio)
    least = least_time_ns(problem)
    rounds = _OTHER_ROUNDS + _STARTS[effort] + _ROUNDS[effort]
    for number, attempts in enumerate(_rounds(moves, effort, still)):
        problem.progress("transfers", number / rounds)
        enough = least if number < _ALWAYS else least + least // _CLOSE
        for _ in attempts:
            if moves.least_ns <= enough:
                return moves.answer
    return moves.answer


def _rounds(moves: _Moves, effort: int, still: Still) -> Iterator[Attempts]:
    """The rounds of the search, each with the knowledge of those before."""
    yield moves.search(QUICK, 0)
    if not moves.moves_only:
        yield _on_chains(moves, effort)
    if effort == 0:
        return
    ladder, warm = SHORT if effort == 1 else LADDER, _WARM[effort]
    yield moves.search(ladder, warm, _still(moves))
    for place in range(_STARTS[effort]):
        if (start := moves.start(place)) is not None:
            yield moves.search(ladder, warm, start)
    for number in range(_ROUNDS[effort], 0, -1):
        if _worth_refining(moves):
            yield moves.search(around(moves.best(1), _STEPS[number % len(_STEPS)]), warm, moves.first)
    yield moves.search(moves.best(_PATIENT[effort]), effort, moves.first)
    quieter = still(moves.least_ns)
    if quieter is not None:  # to go on from, where it is quicker than all that moves
        start = encoded(quieter)
        if run_steps(moves.program, start).time_ns < moves.least_ns:
            yield moves.search(ladder, warm, start)


def _worth_refining(moves: _Moves) -> bool:
    """Whether the latest rounds of refinement were of use."""
    gained = moves.marks[-len(_STEPS)] - moves.least_ns if len(moves.marks) >= len(_STEPS) else INFEASIBLE_NS
    moves.marks.append(moves.least_ns)
    return gained >= moves.problem.costs.total_time_ns // _GAIN


def _still(moves: _Moves) -> Steps | None:
    """The result of a quick search that moves nothing."""
    problem = moves.problem
    if moves.portfolio is None:
        return None
    quiet = replace(problem, on_progress=None, on_better=None)
    found = search_candidate(quiet, moves.portfolio, 1)
    return encoded(moves.portfolio.schedule(found)) if found.peak_bytes <= problem.budget_bytes else None


def _on_chains(moves: _Moves, effort: int) -> Attempts:
    """The schedules of the dynamic programs over blocks, and the answers of ``rotor`` and ``pofo``."""
    problem = moves.problem
    rotor = Rotor().solve(problem).schedule if effort else None
    if rotor is not None:
        steps = encoded(rotor)
        _note_all(moves, [(steps, run_steps(moves.program, steps))])
        yield
    assert moves.portfolio is not None, "blocks run again"
    chains = moves.portfolio.chains
    if not chains.has_blocks:
        return
    builders = menu_builders(chains)[: None if effort > 1 else 0]
    programs = ChainPrograms(problem, chains.model, moves.program)
    for builder in builders:
        _note_all(moves, programs.schedules(builder, _CELLS, moves.least_ns))
        yield


def _note_all(moves: _Moves, schedules: Iterable[tuple[Steps, Run]]) -> None:
    """Record schedules. The best of them is one to start from."""
    fitting = [found for steps, run in schedules if (found := moves.note(steps, run)) is not None]
    if fitting:
        bisect.insort(moves.starts, min(fitting, key=_time_of), key=_time_of)

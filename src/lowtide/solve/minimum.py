"""How small a budget can be: the smallest peak of any schedule found, and a quick bound that none can go below."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtide.ir import Compute, Costs, Graph, Schedule, keep_all_schedule, needed_ops, simulate
from lowtide.solve.bounds import peak_bound
from lowtide.solve.model.compact import compact
from lowtide.solve.model.split import split_for_nothing
from lowtide.solve.model.sweep import Candidate, lowest, quickest
from lowtide.solve.search.memory_paths import affordable, least_peak, shortest
from lowtide.solve.search.portfolio import AnnealRun, Portfolio, make_portfolio
from lowtide.solve.threads import in_threads
from lowtide.store.keys import content_key

# The search for the lowest peak: rounds of short runs, each two lines on.
_ROUND = _QUICKER_ROUND = 12_000  # iterations of a run, about a tenth of a second; of one that makes a schedule quicker
_ROUNDS, _PATIENCE = 30, 6  # at most; so many without anything lower end it
_JOIN = 4  # every so many rounds the line that lags behind goes on from the other
_SMALL_NODES = 200  # up to which the lines join once without anything lower, and every search is tried
_FIRST_STREAM, _HEATS = 512, (0.1, 3.0)  # first temperatures, in mean node times, which take turns
_FEW_NODES = 64
_VARIANTS = 4  # of the search: other random numbers
_NEAR = 1.1  # times the target: as far as searches with other random numbers differ
_ABOVE = (1.0, 1.02)  # times the least budget: what is said of budgets at and just above it
_QUICKER_STREAM, _QUICKER_HEATS = 50, (2.0, 0.3)
_KEPT = 64  # answers, which whoever tries budgets for a program asks for again and again
_answers: dict[str, Candidate] = {}  # by what was asked, the latest last


def minimum_peak(graph: Graph, costs: Costs, seed: int = 0) -> tuple[int, Schedule]:
    """The smallest peak reached and a schedule that has it; ``auto`` with the same seed reaches it too. Exact for
    graphs of up to some dozen nodes, a search from nested segment checkpointing for others."""
    portfolio = make_portfolio(graph, costs, seed)
    exact = smallest_exactly(portfolio)
    found = exact or portfolio.schedule(lowest(lowest_candidates(portfolio, 0)))
    schedules = [keep_all_schedule(graph), found]
    if exact is None and outputs_in_the_way(graph, costs, found):
        portfolio = make_portfolio(graph, costs, seed, released=True)
        schedules.append(portfolio.schedule(lowest(lowest_candidates(portfolio, 0))))
    return min(((simulate(graph, costs, one).peak_bytes, one) for one in schedules), key=lambda pair: pair[0])


def outputs_in_the_way(graph: Graph, costs: Costs, schedule: Schedule) -> bool:
    """Whether what is handed to the caller takes part in the peak of ``schedule`` before that, when it may still be freed and
    computed again."""
    run, handed = simulate(graph, costs, schedule), graph.storages_of(graph.forward_outputs)
    return run.peak_step < schedule.boundary and not {*handed}.isdisjoint(run.live_at_peak)


def smallest_exactly(portfolio: Portfolio) -> Schedule | None:
    """A schedule of the least peak; ``None`` where the graph is too large for the exact search."""
    peak = least_peak(portfolio.exact) if affordable(portfolio.exact) else None
    path = None if peak is None else shortest(portfolio.exact, peak)
    return portfolio.schedule_of(path.nodes) if path is not None and path.found else None


def starting_points(portfolio: Portfolio) -> list[Candidate]:
    """Sequences that do not depend on the budget."""
    return [portfolio.keep_all(), *portfolio.segments()]


def lowest_candidate(portfolio: Portfolio, target_bytes: int, variant: int = 0) -> Candidate:
    """The smallest peak that a search reaches from the lowest starting points, or at most ``target_bytes`` once reached.
    Independent of any budget but for the early end, so that what it finds can be found again. In graphs of a few nodes another
    search takes all times for equal, so that what is found hardly depends on them. ``variant``: other random numbers.

    Answers to the latest questions are kept: they depend on nothing else than what is asked."""
    target_bytes = max(target_bytes, working_set_bound(portfolio.graph, portfolio.costs))  # nothing goes below that
    key = content_key(portfolio.model, portfolio.seed, target_bytes, variant)
    found = _answers.pop(key, None) or _lowest(portfolio, target_bytes, variant)
    _answers[key] = found
    for older in [*_answers][:-_KEPT]:
        _answers.pop(older, None)
    return found


def lowest_candidates(portfolio: Portfolio, target_bytes: int, most: int = _VARIANTS) -> list[Candidate]:
    """What up to ``most`` such searches come to: one may miss what another meets, and of those that meet the target one may be
    far quicker. Only the first where that cannot go lower, or stays far above the target in a program of many operators, where
    each takes long; in others the least that is named for a target far below is then what targets next to it meet."""
    first = lowest_candidate(portfolio, target_bytes)
    far = first.peak_bytes > _NEAR * target_bytes and portfolio.model.nodes > _SMALL_NODES
    if far or target_bytes < first.peak_bytes <= _proven_bytes(portfolio):
        return [first]
    return [first, *(lowest_candidate(portfolio, target_bytes, variant) for variant in range(1, most))]


def _lowest(portfolio: Portfolio, target_bytes: int, variant: int) -> Candidate:
    """The answer itself."""
    found = _lowered(portfolio, target_bytes, variant)
    if portfolio.model.nodes > _FEW_NODES or found.peak_bytes <= max(target_bytes, _proven_bytes(portfolio)):
        return found
    even = portfolio.with_times(replace(portfolio.costs, time_ns=np.ones_like(portfolio.costs.time_ns)))
    again = _lowered(even, target_bytes, variant)
    return lowest([found, *portfolio.measure([again.codes])])


def _lowered(portfolio: Portfolio, target_bytes: int, variant: int) -> Candidate:
    """What rounds make of the lowest starting point, and of the lowest without block programs, until nothing lower came up for
    some rounds."""
    plain = lowest(starting_points(portfolio))
    best = lowest([plain, *portfolio.blocks(plain.peak_bytes)])
    lines, iterations = [best, plain], _iterations(portfolio, _ROUND)
    patience = _PATIENCE if portfolio.model.nodes > _SMALL_NODES else _JOIN
    last, enough = 0, target_bytes  # the round in which the best was found; what ends it
    for number in range(1, _ROUNDS + 1):
        if best.peak_bytes <= enough or number - last > patience:
            break
        first = _FIRST_STREAM + len(lines) * (number + _ROUNDS * variant)
        runs = [AnnealRun(start, first + line, _HEATS[(line + number) % 2]) for line, start in enumerate(lines)]
        lines = in_threads(lambda run: portfolio.lower(run, target_bytes, iterations), runs)
        found = lowest(lines)
        if found.peak_bytes < best.peak_bytes:
            best, last = found, number
        if number % _JOIN == 0:
            lines = [best] * len(lines)
        if number == 1:
            enough = max(enough, _proven_bytes(portfolio))
    return best


def _proven_bytes(portfolio: Portfolio) -> int:
    """What no schedule of a graph of few nodes goes below, where the proof takes far less time than a round of runs."""
    return peak_bound(portfolio.floor) if portfolio.model.nodes <= _SMALL_NODES else 0


def _iterations(portfolio: Portfolio, most: int) -> int:
    """Of a short run, ``most`` but for what grows with the program."""
    return min(portfolio.iterations, most + portfolio.model.nodes)


def sequence_within(graph: Graph, costs: Costs, budget_bytes: int) -> tuple[int, tuple[int, ...]]:
    """Op ids in the order in which they are computed, and the peak of their schedule: fast, for whoever has to go on and
    cannot wait for a good one. The quickest of the greedy sequences that fit; where none does, the lowest that a search
    meets until it fits, so that a peak above the budget says that none was found, and proves nothing. Deterministic."""
    portfolio = make_portfolio(graph, costs, seed=0)
    found = _greedy(portfolio, budget_bytes) or lowest_candidate(portfolio, budget_bytes)
    schedule = portfolio.schedule(found)
    computes = tuple(step.op for step in schedule.steps if isinstance(step, Compute))
    return simulate(graph, costs, schedule).peak_bytes, computes


def greedy_within(graph: Graph, costs: Costs, budget_bytes: int) -> Schedule | None:
    """The quickest of the greedy schedules that fit, in a fraction of a second; ``None`` where none does, which proves
    nothing. Deterministic."""
    portfolio = make_portfolio(graph, costs, seed=0)
    found = _greedy(portfolio, budget_bytes)
    return None if found is None else portfolio.schedule(found)


def _greedy(portfolio: Portfolio, budget_bytes: int) -> Candidate | None:
    """The quickest of the greedy sequences that fit."""
    met = [point for point in portfolio.greedy(budget_bytes) if point.peak_bytes <= budget_bytes]
    return quickest(met)[0] if met else None


def quicker(portfolio: Portfolio, start: Candidate, budget_bytes: int) -> list[Candidate]:
    """What short runs that stay within the budget make of ``start``, which fits: mostly far quicker, far from the best."""
    runs = [AnnealRun(start, stream, heat, True) for stream, heat in enumerate(_QUICKER_HEATS, _QUICKER_STREAM)]
    return portfolio.round(runs, budget_bytes, _iterations(portfolio, _QUICKER_ROUND), 0)


def schedules_above(graph: Graph, costs: Costs, lowest_schedule: Schedule, seed: int = 0) -> list[tuple[int, Schedule]]:
    """Budgets in bytes, the peak of ``lowest_schedule`` and 2 % more, each with a schedule within it that short runs make of
    ``lowest_schedule``. Deterministic."""
    portfolio = make_portfolio(graph, costs, seed)
    best, least = lowest_schedule, simulate(graph, costs, lowest_schedule)
    best_ns, start = least.time_ns, portfolio.of_schedule(lowest_schedule)
    found = []
    for factor in _ABOVE:
        budget = int(least.peak_bytes * factor)
        for candidate in quicker(portfolio, start, budget):
            schedule = portfolio.schedule(candidate)
            result = simulate(graph, costs, schedule)
            if result.peak_bytes <= budget and result.time_ns < best_ns:
                best, best_ns, start = schedule, result.time_ns, candidate
        found.append((budget, best))
    return found


def peak_lower_bound(graph: Graph, costs: Costs) -> int:
    """No schedule peaks below this: the larger of the two bounds."""
    working_set = working_set_bound(graph, costs)
    if costs.second_memory is not None:
        parts = split_for_nothing(graph, costs)
        graph, costs = parts.graph, parts.costs
    return max(working_set, peak_bound(compact(graph, costs, floor=True)))


def working_set_bound(graph: Graph, costs: Costs) -> int:
    """No schedule peaks below this: the largest sum, over the ops that must run, of the bytes that one op reads and
    writes elsewhere, its workspace, what was handed to the caller before it, and ``fixed_bytes``."""
    sizes = np.where([storage.external for storage in graph.storages], 0, costs.storage_bytes)
    held = {*graph.storages_of(graph.forward_outputs)}
    largest = sum(int(sizes[s]) for s in {*graph.storages_of(graph.outputs)} | held)
    for op in sorted(needed_ops(graph)):
        there = {*(graph.read if graph.ops[op].overwrites else graph.touched)[op]}
        there |= held if op >= graph.forward_ops else set()
        largest = max(largest, int(costs.workspace_bytes[op]) + sum(int(sizes[s]) for s in there))
    return largest + graph.fixed_bytes

"""The smallest budget: a search for the schedule with the lowest peak, and quick lower bounds on the peak of any schedule."""

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

# The search for the lowest peak: rounds of short annealing runs, one on each of two lines (of successive sequences).
_ROUND = _QUICKER_ROUND = 12_000  # iterations of a run, about a tenth of a second; of a run of ``quicker``
_ROUNDS, _PATIENCE = 30, 6  # the most rounds; rounds without a lower peak that end the search
_JOIN = 4  # every so many rounds both lines continue from the best sequence
_SMALL_NODES = 200  # the most nodes of programs with a patience of one join, and for which every variant is tried
_FIRST_STREAM, _HEATS = 512, (0.1, 3.0)  # random stream; alternating first temperatures, in mean node times
_FEW_NODES = 64
_VARIANTS = 4  # of the search, with different random numbers
_NEAR = 1.1  # times the target: how far apart searches with different random numbers end
_ABOVE = (1.0, 1.02)  # times the least budget: the budgets of ``schedules_above``
_QUICKER_STREAM, _QUICKER_HEATS = 50, (2.0, 0.3)
_KEPT = 64  # cached answers: callers that try budgets for a program repeat their questions
_answers: dict[str, Candidate] = {}  # cached answers by question, the latest last


def minimum_peak(graph: Graph, costs: Costs, seed: int = 0) -> tuple[int, Schedule]:
    """Return the smallest peak reached and a schedule with that peak; ``auto`` with the same seed reaches it too. Exact for
    graphs of up to some dozen nodes; for others a search that starts from nested segment checkpointing."""
    portfolio = make_portfolio(graph, costs, seed)
    exact = smallest_exactly(portfolio)
    found = exact or portfolio.schedule(lowest(lowest_candidates(portfolio, 0)))
    schedules = [keep_all_schedule(graph), found]
    if exact is None and outputs_in_the_way(graph, costs, found):
        portfolio = make_portfolio(graph, costs, seed, released=True)
        schedules.append(portfolio.schedule(lowest(lowest_candidates(portfolio, 0))))
    return min(((simulate(graph, costs, one).peak_bytes, one) for one in schedules), key=lambda pair: pair[0])


def outputs_in_the_way(graph: Graph, costs: Costs, schedule: Schedule) -> bool:
    """Whether the peak of ``schedule`` is in the forward pass with forward outputs live: freeing and recomputing these before
    the hand-over may then lower the peak."""
    run, handed = simulate(graph, costs, schedule), graph.storages_of(graph.forward_outputs)
    return run.peak_step < schedule.boundary and not {*handed}.isdisjoint(run.live_at_peak)


def smallest_exactly(portfolio: Portfolio) -> Schedule | None:
    """Return a schedule with the least peak; ``None`` if the graph is too large for the exact search."""
    peak = least_peak(portfolio.exact) if affordable(portfolio.exact) else None
    path = None if peak is None else shortest(portfolio.exact, peak)
    return portfolio.schedule_of(path.nodes) if path is not None and path.found else None


def starting_points(portfolio: Portfolio) -> list[Candidate]:
    """Return the starting points that do not depend on the budget."""
    return [portfolio.keep_all(), *portfolio.segments()]


def lowest_candidate(portfolio: Portfolio, target_bytes: int, variant: int = 0) -> Candidate:
    """Search for the lowest peak from the lowest starting points; stop once the peak is at most ``target_bytes``. Except for
    this early stop the result does not depend on a budget, so it can be found again. For small graphs a second search treats
    all times as equal, so that the result hardly depends on them. ``variant`` selects other random numbers.

    The latest answers are cached; they depend only on the arguments."""
    target_bytes = max(target_bytes, working_set_bound(portfolio.graph, portfolio.costs))  # no schedule peaks lower
    key = content_key(portfolio.model, portfolio.seed, target_bytes, variant)
    found = _answers.pop(key, None) or _lowest(portfolio, target_bytes, variant)
    _answers[key] = found
    for older in [*_answers][:-_KEPT]:
        _answers.pop(older, None)
    return found


def lowest_candidates(portfolio: Portfolio, target_bytes: int, most: int = _VARIANTS) -> list[Candidate]:
    """Return the results of up to ``most`` variants of ``lowest_candidate``: one may meet a target that another misses, or find
    a far quicker sequence. Only the first variant is run if it cannot go lower, or if it ends far above the target in a program
    of many operators, where each search takes long. In smaller programs all variants run even then, so that the least peak
    named for a target far below is the one that targets next to it meet."""
    first = lowest_candidate(portfolio, target_bytes)
    far = first.peak_bytes > _NEAR * target_bytes and portfolio.model.nodes > _SMALL_NODES
    if far or target_bytes < first.peak_bytes <= _proven_bytes(portfolio):
        return [first]
    return [first, *(lowest_candidate(portfolio, target_bytes, variant) for variant in range(1, most))]


def _lowest(portfolio: Portfolio, target_bytes: int, variant: int) -> Candidate:
    """Compute the answer of ``lowest_candidate``, without the cache."""
    found = _lowered(portfolio, target_bytes, variant)
    if portfolio.model.nodes > _FEW_NODES or found.peak_bytes <= max(target_bytes, _proven_bytes(portfolio)):
        return found
    even = portfolio.with_times(replace(portfolio.costs, time_ns=np.ones_like(portfolio.costs.time_ns)))
    again = _lowered(even, target_bytes, variant)
    return lowest([found, *portfolio.measure([again.codes])])


def _lowered(portfolio: Portfolio, target_bytes: int, variant: int) -> Candidate:
    """Lower the peak in rounds on two lines, from the lowest starting point and from the lowest without block programs, until
    some rounds in a row find nothing lower."""
    plain = lowest(starting_points(portfolio))
    best = lowest([plain, *portfolio.blocks(plain.peak_bytes)])
    lines, iterations = [best, plain], _iterations(portfolio, _ROUND)
    patience = _PATIENCE if portfolio.model.nodes > _SMALL_NODES else _JOIN
    last, enough = 0, target_bytes  # the round in which the best was found; a peak that ends the search
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
    """Return a lower bound on the peak for small graphs, whose proof takes far less time than a round of runs; else 0."""
    return peak_bound(portfolio.floor) if portfolio.model.nodes <= _SMALL_NODES else 0


def _iterations(portfolio: Portfolio, most: int) -> int:
    """Return the iterations of a short run: ``most`` plus one per node, at most the portfolio's."""
    return min(portfolio.iterations, most + portfolio.model.nodes)


def sequence_within(graph: Graph, costs: Costs, budget_bytes: int) -> tuple[int, tuple[int, ...]]:
    """Quickly find a compute sequence for callers that cannot wait for a good one; return the peak of its schedule and its op
    ids. It is the quickest greedy sequence that fits; if none fits, the lowest that a search meets, which stops once one
    fits. A peak above the budget means that none was found, which proves nothing. Deterministic."""
    portfolio = make_portfolio(graph, costs, seed=0)
    found = _greedy(portfolio, budget_bytes) or lowest_candidate(portfolio, budget_bytes)
    schedule = portfolio.schedule(found)
    computes = tuple(step.op for step in schedule.steps if isinstance(step, Compute))
    return simulate(graph, costs, schedule).peak_bytes, computes


def greedy_within(graph: Graph, costs: Costs, budget_bytes: int) -> Schedule | None:
    """Return the quickest greedy schedule that fits, in a fraction of a second; ``None`` if none fits, which proves nothing.
    Deterministic."""
    portfolio = make_portfolio(graph, costs, seed=0)
    found = _greedy(portfolio, budget_bytes)
    return None if found is None else portfolio.schedule(found)


def _greedy(portfolio: Portfolio, budget_bytes: int) -> Candidate | None:
    """Return the quickest greedy sequence that fits."""
    met = [point for point in portfolio.greedy(budget_bytes) if point.peak_bytes <= budget_bytes]
    return quickest(met)[0] if met else None


def quicker(portfolio: Portfolio, start: Candidate, budget_bytes: int) -> list[Candidate]:
    """Make ``start``, which fits, quicker by short runs that stay within the budget: mostly far quicker, far from the best."""
    runs = [AnnealRun(start, stream, heat, True) for stream, heat in enumerate(_QUICKER_HEATS, _QUICKER_STREAM)]
    return portfolio.round(runs, budget_bytes, _iterations(portfolio, _QUICKER_ROUND), 0)


def schedules_above(graph: Graph, costs: Costs, lowest_schedule: Schedule, seed: int = 0) -> list[tuple[int, Schedule]]:
    """Return two budgets in bytes, the peak of ``lowest_schedule`` and 2 % more, each with a quicker schedule within it (if
    one is found) that short runs make of ``lowest_schedule``. Deterministic."""
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
    """Return a lower bound on the peak of any schedule: the larger of ``working_set_bound`` and ``peak_bound``."""
    working_set = working_set_bound(graph, costs)
    if costs.second_memory is not None:
        parts = split_for_nothing(graph, costs)
        graph, costs = parts.graph, parts.costs
    return max(working_set, peak_bound(compact(graph, costs, floor=True)))


def working_set_bound(graph: Graph, costs: Costs) -> int:
    """Return a lower bound on the peak of any schedule: the largest sum, over the ops that must run, of the bytes that the op
    reads and writes (not over its inputs), its workspace, earlier outputs handed to the caller, and ``fixed_bytes``."""
    sizes = np.where([storage.external for storage in graph.storages], 0, costs.storage_bytes)
    held = {*graph.storages_of(graph.forward_outputs)}
    largest = sum(int(sizes[s]) for s in {*graph.storages_of(graph.outputs)} | held)
    for op in sorted(needed_ops(graph)):
        there = {*(graph.read if graph.ops[op].overwrites else graph.touched)[op]}
        there |= held if op >= graph.forward_ops else set()
        largest = max(largest, int(costs.workspace_bytes[op]) + sum(int(sizes[s]) for s in there))
    return largest + graph.fixed_bytes

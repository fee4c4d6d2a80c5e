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

_STREAMS = (60, 61, 62)  # of the runs from each starting point
_FEW_NODES = 64
BRIEF = 0.2  # of the iterations of a search at default effort
_ABOVE = (1.0, 1.02)  # times the least budget: what is said of budgets at and just above it
_ABOVE_STREAM, _ABOVE_HEATS, _ABOVE_SHARE = 50, (2.0, 0.3), 0.04
_BLOCKS_SHARE = 0.25  # of the peak without recomputation: the budget that block programs are asked for


def minimum_peak(graph: Graph, costs: Costs, seed: int = 0) -> tuple[int, Schedule]:
    """The smallest peak reached and a schedule that has it; ``auto`` with the same seed reaches it too. Exact for
    graphs of a few nodes, a search from nested segment checkpointing for others."""
    portfolio = make_portfolio(graph, costs, seed)
    exact = smallest_exactly(portfolio)
    found = exact or portfolio.schedule(lowest_candidate(portfolio, 0))
    schedules = [keep_all_schedule(graph), found]
    if exact is None and outputs_in_the_way(graph, costs, found):
        portfolio = make_portfolio(graph, costs, seed, released=True)
        schedules.append(portfolio.schedule(lowest_candidate(portfolio, 0)))
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
    return None if path is None else portfolio.schedule_of(path.nodes)


def starting_points(portfolio: Portfolio) -> list[Candidate]:
    """Sequences that do not depend on the budget."""
    return [portfolio.keep_all(), *portfolio.segments()]


def lowest_candidate(portfolio: Portfolio, target_bytes: int, share: float = 1.0) -> Candidate:
    """The smallest peak that runs from the lowest starting points reach, or at most ``target_bytes`` once reached.
    ``share`` of the iterations at default effort. Independent of any budget but for the early end, so that what it
    finds can be found again. In graphs of a few nodes another run takes all times for equal, so that what is found hardly
    depends on them."""
    iterations = int(share * portfolio.iterations)
    found = _lowered(portfolio, target_bytes, iterations)
    if found.peak_bytes <= target_bytes or portfolio.model.nodes > _FEW_NODES:
        return found
    even = portfolio.with_times(replace(portfolio.costs, time_ns=np.ones_like(portfolio.costs.time_ns)))
    again = _lowered(even, target_bytes, iterations)
    return lowest([found, *portfolio.measure([again.codes])])


def _lowered(portfolio: Portfolio, target_bytes: int, iterations: int) -> Candidate:
    """What one run after the other makes of the lowest starting points."""
    plain = starting_points(portfolio)
    top = max(point.peak_bytes for point in plain)
    starts = [lowest(points) for points in (plain, portfolio.blocks(int(_BLOCKS_SHARE * top))) if points]

    def lower(start: Candidate) -> Candidate:
        for stream in _STREAMS:
            if start.peak_bytes > target_bytes:
                start = portfolio.lower(start, target_bytes, iterations, stream)
        return start

    return lowest(in_threads(lower, starts))


def sequence_within(graph: Graph, costs: Costs, budget_bytes: int) -> tuple[int, tuple[int, ...]]:
    """Op ids in the order in which they are computed, and the peak of their schedule: fast, for whoever has to go on and
    cannot wait for a good one. The quickest of the greedy sequences that fit; where none does, the lowest that a search
    meets until it fits, so that a peak above the budget says that none was found, and proves nothing. Deterministic."""
    portfolio = make_portfolio(graph, costs, seed=0)
    found = _greedy(portfolio, budget_bytes) or lowest_candidate(portfolio, budget_bytes, BRIEF)
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


def times_above(graph: Graph, costs: Costs, lowest_schedule: Schedule, seed: int = 0) -> list[tuple[int, int]]:
    """Budgets in bytes, the peak of ``lowest_schedule`` and 2 % more, each with the time in ns of a schedule within it: what a
    brief search makes of ``lowest_schedule``, far from the best but mostly far quicker than that. Deterministic."""
    portfolio = make_portfolio(graph, costs, seed)
    least = simulate(graph, costs, lowest_schedule)
    best, best_ns = portfolio.of_schedule(lowest_schedule), least.time_ns
    found = []
    for step, factor in enumerate(_ABOVE):
        budget = int(least.peak_bytes * factor)
        streams = range(_ABOVE_STREAM + 2 * step, _ABOVE_STREAM + 2 * step + 2)
        runs = [AnnealRun(best, stream, heat, strict=True) for stream, heat in zip(streams, _ABOVE_HEATS, strict=True)]
        for candidate in portfolio.round(runs, budget, int(_ABOVE_SHARE * portfolio.iterations), 0):
            result = simulate(graph, costs, portfolio.schedule(candidate))
            if result.peak_bytes <= budget and result.time_ns < best_ns:
                best, best_ns = candidate, result.time_ns
        found.append((budget, best_ns))
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

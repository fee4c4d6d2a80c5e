"""The search of ``auto`` over compute sequences of one model: starting points, a bound, annealing, recombination."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from lowtide.solve.bounds import prove_time, proven_infeasible
from lowtide.solve.minimum import lowest_candidates, quicker, starting_points, working_set_bound
from lowtide.solve.model.compact import encode
from lowtide.solve.model.sweep import Candidate, lowest, quickest
from lowtide.solve.outcome import answer, bounded_by
from lowtide.solve.problem import Problem, Solution, Status
from lowtide.solve.search.anneal import make_state
from lowtide.solve.search.portfolio import AnnealRun, Portfolio
from lowtide.solve.search.recombine import children, survivors
from lowtide.solve.search.tightening import tightened

EFFORTS = {0: 0.0, 1: 0.04, 2: 0.25, 3: 1.0, 4: 3.0, 5: 10.0}  # factors of the iterations of a run
_BOUND_EFFORT, _BOUND_NODES = 3, 1400  # the most effort for the lower bound, in its own scale; 1 above so many nodes
# First temperatures of runs, in mean node times. Hot runs pay only if there are many iterations per node.
_HOT_NODES = 1200
_HOT, _WARM = (2.0,) * 8, (1.0, 0.3)
_CHILDREN = (0.1, 0.04)  # of the children of a generation, which run on two threads
_STRICT = (0.3, 1.0)  # of strict runs, also of the children of every third generation if the plan is far from the bound
_RUN_PART, _CHILD_PART = 8, 16  # a run gets 1/8 of the iterations, a child's run 1/16
_FIRST_STRICT, _FIRST_CHILD = 40, 64  # random streams, apart from those of the first runs and of the lowest peak
_POINTS, _POPULATION = 4, 10  # starting points that take part; sequences that are recombined
_GENERATIONS, _LARGE_NODES, _LARGE_GENERATIONS = 60, 800, 36  # the most generations; fewer above so many nodes
# Distances of a plan from the bound, as fractions of the program's time, above which the bound or the search tries more.
_WIDE_BOUND, _WIDE_PLAN = 0.02, 0.1
_PATIENCE = 20  # generations without improvement that end the search


def search_sequences(problem: Problem, portfolio: Portfolio, effort: int, *, beaten_ns: int | None = None) -> Solution:
    """Search for the quickest schedule with an ``effort`` of 0 (starting points only) to 5, and prove a lower bound, which ends
    the search when it is met. ``beaten_ns``: the time of a schedule found otherwise; if the bound is not below it, the
    quickest starting point is the answer."""
    nodes = portfolio.model.nodes
    fitting = _fitting(problem, portfolio, effort)
    if fitting[0].peak_bytes > problem.budget_bytes:
        solution = answer("auto", problem, [portfolio.schedule(fitting[0])])
        proven = not solution.status.solved and (
            _is_hopeless(problem) or proven_infeasible(portfolio.floor, problem.budget_bytes)
        )
        return dataclasses.replace(solution, status=Status.INFEASIBLE) if proven else solution
    best = quickest(fitting, 1)[0]
    if effort == 0:
        return answer("auto", problem, [portfolio.schedule(best)])
    iterations, begun = int(EFFORTS[effort] * portfolio.iterations), None
    if problem.on_better is not None and beaten_ns is None:  # better answers need not wait for the bound
        begun = _first_runs(problem, portfolio, fitting, iterations // _RUN_PART, 0)
        _offer_best(problem, portfolio, begun)
    problem.progress("proving a bound", 0.05)
    known_ns = portfolio.time_ns(best)
    bound_effort = min(effort, _BOUND_EFFORT if nodes <= _BOUND_NODES else 1)
    bound = prove_time(portfolio.floor, problem.budget_bytes, effort=bound_effort, known_ns=known_ns)
    if beaten_ns is not None and bound.ns >= beaten_ns:
        return answer("auto", problem, [portfolio.schedule(best)])
    found = _anneal(problem, portfolio, fitting, iterations, bound.ns, begun=begun)
    reached = quickest(found, 1)[0]
    if _far(portfolio, reached, bound.ns, _WIDE_BOUND):
        problem.progress("proving a bound", 1.0)
        bound = bound.refined(effort, portfolio.time_ns(reached))
    problem.progress("done", 1.0)
    return bounded_by(answer("auto", problem, [portfolio.schedule(point) for point in quickest(found, 6)]), bound.ns)


def search_candidate(
    problem: Problem,
    portfolio: Portfolio,
    effort: int,
    known: Iterable[Sequence[int]] = (),
    patience: int = _PATIENCE,
) -> Candidate:
    """Search for the quickest sequence, without a bound; if none is within the budget, return the lowest. ``known``: compute
    sequences (op ids), used as the starting points if one of them fits. ``patience``: the number of generations without
    improvement that ends the search."""
    fitting = _fitting(problem, portfolio, effort, known)
    best = quickest(fitting, 1)[0]
    if effort == 0 or best.peak_bytes > problem.budget_bytes:
        return best
    found = _anneal(problem, portfolio, fitting, int(EFFORTS[effort] * portfolio.iterations), 0, patience)
    return quickest(found, 1)[0]


def _fitting(
    problem: Problem, portfolio: Portfolio, effort: int, known: Iterable[Sequence[int]] = ()
) -> list[Candidate]:
    """Return starting points within the budget: the ``known`` ones if any of them fits. If none fits, only the lowest found."""
    problem.progress("starting points", 0.0)
    budget = problem.budget_bytes
    given = portfolio.measure(encode(portfolio.model, ops) for ops in known)
    fitting = [point for point in given if point.peak_bytes <= budget]
    if not fitting and not _is_hopeless(problem):
        fitting = _starting(problem, portfolio, first=effort == 0)
    found = bool(fitting)
    if not found:
        problem.progress("lowering the peak", 0.05)
        met = lowest_candidates(portfolio, budget) if effort else lowest_candidates(portfolio, budget, 1)
        fitting = [point for point in met if point.peak_bytes <= budget] or [lowest(met)]
    if (effort and found) or fitting[0].peak_bytes > budget:
        return fitting
    starts = fitting if effort else quickest(fitting, 1)
    return [*fitting, *(point for start in starts for point in quicker(portfolio, start, budget))]


def _is_hopeless(problem: Problem) -> bool:
    """Whether the working set of some operator exceeds the budget."""
    return working_set_bound(problem.graph, problem.costs) > problem.budget_bytes


def _starting(problem: Problem, portfolio: Portfolio, *, first: bool) -> list[Candidate]:
    """Return the starting points within the budget; ``first``: only those of the quick kinds."""

    def fit(points: list[Candidate]) -> list[Candidate]:
        return [point for point in points if point.peak_bytes <= budget]

    budget = problem.budget_bytes
    found = fit([*starting_points(portfolio), *portfolio.greedy(budget)])
    if first:
        return found
    heard = _offer_annealed(problem, portfolio, found)
    found += fit(portfolio.blocks(budget, lambda some: _offer_best(problem, portfolio, fit(some))))
    if portfolio.model.nodes > _HOT_NODES and portfolio.chains.has_blocks:
        found += fit(portfolio.tables_of_rockmate())  # a search with few moves per node cannot make up for these
    if found and quickest([*found, *heard], 1)[0] is quickest(found, 1)[0]:
        _offer_annealed(problem, portfolio, found)
    return found


def _offer_annealed(problem: Problem, portfolio: Portfolio, points: list[Candidate]) -> list[Candidate]:
    """Improve ``points`` by a short search and report the best to ``on_better``. The results are not part of the answer."""
    if problem.on_better is None or not points:
        return []
    quick = int(EFFORTS[1] * portfolio.iterations)
    annealed = _anneal(dataclasses.replace(problem, on_better=None), portfolio, points, quick, 0)
    _offer_best(problem, portfolio, annealed)
    return quickest(annealed, _POINTS)


def _offer_best(problem: Problem, portfolio: Portfolio, points: list[Candidate]) -> None:
    if problem.on_better is not None and points:
        _offer(problem, portfolio, quickest(points, 1)[0])


def _offer(problem: Problem, portfolio: Portfolio, found: Candidate) -> None:
    problem.better(portfolio.time_ns(found), lambda: answer("auto", problem, [portfolio.schedule(found)]))


def _far(portfolio: Portfolio, best: Candidate, bound_ns: int, wide: float) -> bool:
    """Whether ``best`` exceeds the bound, if there is one, by more than the fraction ``wide`` of the program's time."""
    return bound_ns > 0 and portfolio.time_ns(best) - bound_ns > wide * portfolio.model.least_ns


def _anneal(
    problem: Problem,
    portfolio: Portfolio,
    points: list[Candidate],
    iterations: int,
    bound_ns: int,
    patience: int = _PATIENCE,
    begun: list[Candidate] | None = None,
) -> list[Candidate]:
    """Improve ``points`` by annealing and recombination; quickest first. ``begun``: the results of the first runs, if made."""
    part = iterations // _RUN_PART
    met = _first_runs(problem, portfolio, points, part, bound_ns) if begun is None else begun
    known = survivors([*met, *quickest(points, _POINTS)], _POINTS)
    if _far(portfolio, known[0], bound_ns, _WIDE_PLAN):
        down = survivors(tightened(portfolio, problem.budget_bytes, part), _POINTS // 2)
        known = [*down, *known][:_POINTS]  # slow as yet, but these may become the quickest
        met += down
        pairs = itertools.product(known, _STRICT)
        runs = [AnnealRun(start, stream, heat, True) for stream, (start, heat) in enumerate(pairs, _FIRST_STRICT)]
        met += portfolio.round(runs, problem.budget_bytes, part, bound_ns)
    population = survivors([*met, *quickest(points, _POINTS)], _POPULATION)
    _offer(problem, portfolio, population[0])
    return _recombine(problem, portfolio, population, iterations // _CHILD_PART, bound_ns, patience)


def _first_runs(
    problem: Problem, portfolio: Portfolio, points: list[Candidate], iterations: int, bound_ns: int
) -> list[Candidate]:
    """Run hot annealing from the program without recomputation, and warm annealing from the best of ``points``."""
    problem.progress("annealing", 0.1)
    met: list[Candidate] = []
    if portfolio.model.nodes <= _HOT_NODES:
        runs = [AnnealRun(portfolio.keep_all(), stream, heat) for stream, heat in enumerate(_HOT)]
        met = portfolio.round(runs, problem.budget_bytes, iterations, bound_ns)
    warm = _WARM if met else _WARM * 4  # more if hot runs found nothing that fits, or were not made
    runs = [AnnealRun(quickest(points, 1)[0], stream, heat) for stream, heat in enumerate(warm, len(_HOT))]
    return met + portfolio.round(runs, problem.budget_bytes, iterations, bound_ns)


def _recombine(
    problem: Problem, portfolio: Portfolio, population: list[Candidate], iterations: int, bound_ns: int, patience: int
) -> list[Candidate]:
    """Recombine the population: anneal each child for a while, until ``patience`` generations brought no improvement."""
    generations = _GENERATIONS if portfolio.model.nodes <= _LARGE_NODES else _LARGE_GENERATIONS
    rng = make_state(problem.seed)
    last = 0  # generation in which the best was found
    for generation in range(generations):
        best = population[0]
        if portfolio.time_ns(best) <= bound_ns or generation - last > patience:
            break
        problem.progress("recombining", 0.3 + 0.7 * generation / generations)
        starts = portfolio.measure(children(population, len(_CHILDREN), rng))
        stream = _FIRST_CHILD + len(_CHILDREN) * generation
        strict = generation % 3 == 2 and _far(portfolio, best, bound_ns, _WIDE_PLAN)
        if strict:
            starts[0] = best
        heats = _STRICT if strict else _CHILDREN
        runs = [AnnealRun(starts[child], stream + child, heat, strict) for child, heat in enumerate(heats)]
        met = portfolio.round(runs, problem.budget_bytes, iterations, bound_ns)
        population = survivors([*population, *met], _POPULATION)
        if population[0].recompute_ns < best.recompute_ns:
            last = generation
            _offer(problem, portfolio, population[0])
    return population

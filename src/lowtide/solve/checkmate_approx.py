"""``checkmate-approx``: linear relaxation and two-phase rounding (Jain et al., MLSys 2020, arXiv 1910.02653, section 5,
algorithm 2).

Solves the linear relaxation of Checkmate's program (``lowtide.solve.milp.stages``, reduced form) for a part of the budget,
rounds the columns S (which storages are kept), completes them with the least recomputation, and rejects schedules over the
budget. The completion goes through the stages backwards: the storages that a stage hands on and that its node reads are taken
from the stored ones or else recomputed, which asks for their inputs in turn. A storage that cannot be recomputed is kept from
its first compute on, so every rounding gives a valid sequence. A heuristic: no guarantee of cost or feasibility, and no
bound. Completion is linear in nodes x reads.

Deviations: unless given, the reserve (0.1 in the paper) is searched over ``RESERVES``. Besides the paper's S = 1[S* > 0.5]
and its random draws there is a sweep of thresholds. Above ``MOST_RECOMPUTES`` variables recomputation is planned only in
every second, third ... stage. Keeping everything and keeping nothing of the forward pass are always among the candidates.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowtide.ir import keep_all_schedule, simulate
from lowtide.solve.milp.formulation import ONE, Formulation
from lowtide.solve.milp.linear import Floats, Outcome, SolverOptions, solve_program
from lowtide.solve.milp.stages import StageModel
from lowtide.solve.model.compact import CompactGraph, Indices, encode_keep_all
from lowtide.solve.model.reach import recompute_columns
from lowtide.solve.options import Options, above_zero, one_of, option
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution
from lowtide.solve.search.portfolio import make_portfolio

RESERVES = (0.1, 0.05, 0.0, 0.15, 0.2, 0.3, 0.4, 0.5)
MOST_RECOMPUTES = 8_000
MOST_NODES = 3_000
_THRESHOLDS = tuple(step / 20 for step in range(1, 20))
_ATTEMPTS = 6  # to find a budget that can be met; together they may take the time limit once more


@dataclass(frozen=True, slots=True)
class CheckmateApprox(Options):
    """The planner ``checkmate-approx``. ``rounding``: deterministic, sweep or randomised; ``reserve``: fraction of the budget
    left out, 0 to search it; ``samples``: draws of ``randomised`` per linear program; ``time_limit``: seconds for all
    linear programs."""

    rounding: str = one_of("sweep", ("deterministic", "sweep", "randomised"))
    reserve: float = option(0.0, lambda reserve: 0 <= reserve < 1, "goes from 0 (searched) to below 1")
    samples: int = option(50, lambda samples: samples >= 1, "must be at least 1")
    time_limit: float = above_zero(60.0)

    def search(self, problem: Problem) -> Solution:
        solution = self._attempt(problem)
        return solution if solution.status.solved else self._reachable(problem, solution)

    def _attempt(self, problem: Problem) -> Solution:
        """Return the quickest candidate of all reserves within the budget; if none fits, the lowest."""
        portfolio = make_portfolio(problem.graph, problem.costs, problem.seed)
        candidates = portfolio.measure(self._sequences(portfolio.model, problem))
        budget = problem.budget_bytes
        best = min(candidates, key=lambda c: (max(c.peak_bytes - budget, 0), c.recompute_ns, c.peak_bytes))
        return answer(self.name, problem, [portfolio.schedule(best)])

    def _sequences(self, model: CompactGraph, problem: Problem) -> Iterator[Indices]:
        """Yield encoded sequences; those that do not depend on the budget come first."""
        began = time.perf_counter()
        yield encode_keep_all(model)
        if model.nodes > MOST_NODES:
            return
        every = 1 + recompute_columns(model, reduced=True) // MOST_RECOMPUTES
        formulation = StageModel(model, problem.budget_bytes, reduced=True, every=every).build()
        yield completed(formulation, _gradients_only(formulation))
        infeasible = 1.0
        for reserve in (self.reserve,) if self.reserve else RESERVES:
            remaining = self.time_limit - (time.perf_counter() - began)
            if remaining <= 0 or reserve >= infeasible:
                continue
            room = int(problem.budget_bytes * (1 - reserve))
            formulation = StageModel(model, room, reduced=True, every=every, integer=False).build()
            settings = SolverOptions(time_limit=remaining, method="simplex", seed=problem.seed)
            result = solve_program(formulation.program, settings)
            if result.outcome is Outcome.INFEASIBLE:
                infeasible = reserve
            if len(result.values):
                for rounded in roundings(result.values, self.rounding, self.samples, problem.seed):
                    yield completed(formulation, rounded)

    def _reachable(self, problem: Problem, solution: Solution) -> Solution:
        """Set ``minimum_bytes`` to a peak that the planner reaches when that is its budget: try budgets upwards from the lowest
        peak found, and in the end take the program without recomputation."""
        brief = dataclasses.replace(self, time_limit=self.time_limit / _ATTEMPTS)  # with more time it reaches no less
        lowest = solution.minimum_bytes or 0
        for _ in range(_ATTEMPTS):
            again = brief._attempt(dataclasses.replace(problem, budget_bytes=lowest))
            if again.status.solved:
                schedule = again.schedule
                break
            lowest = max(again.minimum_bytes or 0, lowest + lowest // 20)
        else:
            schedule = keep_all_schedule(problem.graph)
            lowest = simulate(problem.graph, problem.costs, schedule).peak_bytes
        return dataclasses.replace(solution, minimum_bytes=lowest, lowest_schedule=schedule)


def _gradients_only(formulation: Formulation) -> Floats:
    """Return the columns S for keeping nothing of the forward pass."""
    model, rounded = formulation.model, np.zeros(len(formulation.program.cost))
    for stored in formulation.stored:
        backward = [c for s, c in stored.items() if c >= 0 and model.storage_node[s] >= model.boundary]
        rounded[backward] = 1.0
    return rounded


def roundings(values: Floats, rounding: str, samples: int, seed: int) -> Iterator[Floats]:
    """Yield the columns S rounded to 0 and 1: at 0.5, at a sweep of thresholds, or drawn with S* as probability."""
    if rounding == "randomised":
        draw = np.random.default_rng(seed)
        for _ in range(samples):
            yield (draw.random(len(values)) < values).astype(float)
    else:
        for threshold in (0.5,) if rounding == "deterministic" else _THRESHOLDS:
            yield (values > threshold).astype(float)


def completed(formulation: Formulation, rounded: Floats) -> Indices:
    """Return the encoded sequence with the least recomputation for the storages that ``rounded`` keeps."""
    model, reach, kept = formulation.model, formulation.reach, set[int]()
    parts: list[list[int]] = [[model.nodes]]
    for stage in range(model.nodes, -1, -1):
        stored = formulation.stored[stage]
        wanted = (kept - {*reach.owns[stage]}) | {*reach.reads[stage]}
        available = {s for s, column in stored.items() if column == ONE or (column >= 0 and rounded[column] > 0.5)}
        recomputed, kept = _recomputed(formulation, stage, wanted, available)
        if stage < model.nodes:
            parts.append([stage])
        parts.append([~node for node in recomputed])
    return np.array([code for part in reversed(parts) for code in part], np.int32)


def _recomputed(
    formulation: Formulation, stage: int, wanted: set[int], available: set[int]
) -> tuple[list[int], set[int]]:
    """Return the nodes to recompute in the stage, ascending, and the storages that it takes over from the previous stage."""
    reach = formulation.reach
    pending = [(-reach.base[storage], storage) for storage in wanted]
    heapq.heapify(pending)
    seen, recomputed, kept = set(wanted), set[int](), set[int]()
    while pending:
        storage = heapq.heappop(pending)[1]
        base = reach.base[storage]
        if storage in available or base not in formulation.recompute[stage]:
            kept.add(storage)
        elif base not in recomputed:
            recomputed.add(base)
            for read in reach.reads[base]:
                if read not in seen:
                    seen.add(read)
                    heapq.heappush(pending, (-reach.base[read], read))
    return sorted(recomputed), kept

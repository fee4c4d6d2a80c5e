"""``checkmate-approx``: linear relaxation and two-phase rounding (Jain et al., MLSys 2020, arXiv 1910.02653, section 5,
algorithm 2).

Solves Checkmate's program (``lowtide.solve.milp.stages``, reduced form) as a linear one for a part of the budget, rounds
which storages are kept, completes with the least recomputation and rejects what peaks above the budget. Stages are walked
backwards: what one must hand on and what its node reads is taken from what is stored, else recomputed, which asks for
inputs in turn; what cannot be recomputed is kept from where it was made, so that every rounding gives a valid sequence. A
heuristic: no guarantee of cost or feasibility, and no bound. Completion is linear in nodes x reads.

Deviations: the paper's reserve of 0.1 is searched over ``RESERVES`` unless given; beside its S = 1[S* > 0.5] and its draws
there is a sweep of thresholds; above ``MOST_RECOMPUTES`` variables recomputation is planned only in every second, third ..
stage. Keeping everything and keeping nothing of the forward pass are always among the candidates.
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
_ATTEMPTS = 6  # to find a budget that can be met, together within the time limit once more


@dataclass(frozen=True, slots=True)
class CheckmateApprox(Options):
    """``rounding``: deterministic, sweep or randomised; ``reserve``: part of the budget left out, 0 to search it;
    ``samples``: draws of ``randomised`` per linear program; ``time_limit`` in seconds for all linear programs."""

    rounding: str = one_of("sweep", ("deterministic", "sweep", "randomised"))
    reserve: float = option(0.0, lambda reserve: 0 <= reserve < 1, "goes from 0 (searched) to below 1")
    samples: int = option(50, lambda samples: samples >= 1, "must be at least 1")
    time_limit: float = above_zero(60.0)

    def search(self, problem: Problem) -> Solution:
        solution = self._attempt(problem)
        return solution if solution.status.solved else self._reachable(problem, solution)

    def _attempt(self, problem: Problem) -> Solution:
        """The quickest candidate of all reserves within the budget, or the lowest."""
        portfolio = make_portfolio(problem.graph, problem.costs, problem.seed)
        candidates = portfolio.measure(self._sequences(portfolio.model, problem))
        budget = problem.budget_bytes
        best = min(candidates, key=lambda c: (max(c.peak_bytes - budget, 0), c.recompute_ns, c.peak_bytes))
        return answer(self.name, problem, [portfolio.schedule(best)])

    def _sequences(self, model: CompactGraph, problem: Problem) -> Iterator[Indices]:
        """Encoded sequences, those that do not depend on the budget first."""
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
        """With a peak for ``minimum_bytes`` that the planner reaches when it is asked for just that, going up from what
        it found; at last the program as written."""
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
    """The columns S when nothing of the forward pass is kept."""
    model, rounded = formulation.model, np.zeros(len(formulation.program.cost))
    for stored in formulation.stored:
        backward = [c for s, c in stored.items() if c >= 0 and model.storage_node[s] >= model.boundary]
        rounded[backward] = 1.0
    return rounded


def roundings(values: Floats, rounding: str, samples: int, seed: int) -> Iterator[Floats]:
    """The columns S rounded to 0 and 1: at 0.5, at a sweep of thresholds, or drawn with S* as probability."""
    if rounding == "randomised":
        draw = np.random.default_rng(seed)
        for _ in range(samples):
            yield (draw.random(len(values)) < values).astype(float)
    else:
        for threshold in (0.5,) if rounding == "deterministic" else _THRESHOLDS:
            yield (values > threshold).astype(float)


def completed(formulation: Formulation, rounded: Floats) -> Indices:
    """The encoded sequence with the least recomputation for the storages that ``rounded`` keeps."""
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
    """Nodes to recompute in the stage, ascending, and the storages that it takes over from the stage before."""
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

"""``checkmate``: the optimal schedule by mixed-integer programming (Jain et al., MLSys 2020, arXiv 1910.02653, section 4).

Solves the full problem: order-preserving schedules with recomputation anywhere. Three programs share one set of variables
(``lowtide.solve.milp.stages``): *any order*, a relaxation whose bound holds for every schedule; *ordered*, Checkmate's
program, a restriction; and *reduced* (``form=reduced``), without recomputation in the forward pass.
``docs/planners/checkmate.md`` says why there are three.

A schedule is ``OPTIMAL`` if it meets the any-order bound, or if the shortest path over memory states
(``lowtide.solve.search.memory_paths``, small graphs) proves it. A budget is ``INFEASIBLE`` if the any-order program has no
solution, if one op's working set exceeds the budget, or by the shortest path. All within the tolerances of HiGHS: sums are
small integers where possible, bounds are reduced by 1e-7 and rounded, and a solution that the simulator finds above the
budget is excluded by solving again with a tighter budget. If the programs settle nothing within the time limit, the bound is
the better of theirs and that of ``lowtide.solve.bounds``. If the compact model is not exact, nothing is claimed.

With a second memory, a program with transfers (``lowtide.solve.moving.program``) gives a bound for all schedules with
transfers, and a schedule. That competes by the exact clock with the schedules without transfers and that of
``auto{effort=1}``. ``objective=peak`` plans no transfers, and claims nothing if transfers are possible.

Exponential in the worst case; the number of variables grows with nodes x stages, so above ``MOST_RECOMPUTES`` of them no
program is built and the answer is that of ``auto``.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import ClassVar

from lowtide.ir import Schedule, keep_all_schedule, shared_storages
from lowtide.solve.bounds import time_bound
from lowtide.solve.milp.linear import SolverOptions
from lowtide.solve.milp.search import EQUAL, NEVER, Search
from lowtide.solve.minimum import minimum_peak, working_set_bound
from lowtide.solve.model.compact import bounding_model
from lowtide.solve.moving.exact import solve_with_transfers
from lowtide.solve.options import Options, above_zero, one_of, option
from lowtide.solve.outcome import among_moving, answer, least_time_ns, within_second_memory
from lowtide.solve.problem import Problem, Solution, Status
from lowtide.solve.registry import get_planner

_STILL = 0.3  # with a second memory, the fraction of the time limit for schedules without transfers
_LEAST_SECONDS = 1.0  # the least time for the program with transfers


@dataclass(frozen=True, slots=True)
class Checkmate(Options):
    """The planner ``checkmate``. ``time_limit``: seconds for all programs together; ``gap``: relative gap of the recompute time
    at which a program stops; ``objective=peak``: minimise the peak instead of the time (``OPTIMAL`` then means that no
    schedule peaks lower); ``warm_start``: begin with the schedule of ``auto{effort=1}``, or of ``auto`` if no program
    follows."""

    time_limit: float = above_zero(60.0)
    gap: float = option(0.0, lambda gap: 0 <= gap < 1, "goes from 0 to below 1")
    form: str = one_of("auto", ("auto", "full", "reduced"))
    objective: str = one_of("time", ("time", "peak"))
    threads: int = option(1, lambda threads: threads >= 1, "must be at least 1")
    warm_start: bool = True

    moves: ClassVar[bool] = True

    def solve(self, problem: Problem) -> Solution:
        if self.objective == "time":
            return Options.solve(self, problem)
        solution = self._least_peak(problem)
        return solution if problem.costs.second_memory is None else among_moving(problem, solution)

    def search(self, problem: Problem) -> Solution:
        return self._least_time(problem) if problem.costs.second_memory is None else self._with_moves(problem)

    def _with_moves(self, problem: Problem) -> Solution:
        """Minimise the time within the budget with transfers; the schedules found without transfers compete."""
        began = time.perf_counter()
        still = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, second_memory=None))
        known = [dataclasses.replace(self, time_limit=self.time_limit * _STILL).solve(still)]
        if self.warm_start:
            known.append(get_planner("auto{effort=1}").solve(problem))
        candidates = [keep_all_schedule(problem.graph)]
        candidates += [each for one in known for each in one.schedules]
        best = answer("checkmate", problem, candidates)
        limit = max(self.time_limit - (time.perf_counter() - began), _LEAST_SECONDS)
        options = SolverOptions(limit, self.gap, threads=self.threads, seed=problem.seed)
        proof = solve_with_transfers(problem, options, best.time_ns if best.status.solved else None)
        if proof.schedule is not None:
            candidates.append(proof.schedule)
        solution = answer("checkmate", problem, within_second_memory(problem, candidates))
        proven = [one.lower_bound_ns or 0 for one in known[1:]]
        bound = max(least_time_ns(problem), proof.bound_ns, *proven)
        if not solution.status.solved:
            impossible = proof.bound_ns == NEVER or any(one.status is Status.INFEASIBLE for one in known[1:])
            return dataclasses.replace(solution, status=Status.INFEASIBLE) if impossible else solution
        status = Status.OPTIMAL if solution.time_ns <= bound * (1 + EQUAL) else Status.FEASIBLE
        return dataclasses.replace(solution, status=status, lower_bound_ns=min(bound, solution.time_ns))

    def _search(self, problem: Problem, budget_bytes: int | None, began: float) -> Search:
        options = SolverOptions(self.time_limit, self.gap, threads=self.threads, seed=problem.seed)
        return Search(problem, options, self.form, budget_bytes, began)

    def _least_time(self, problem: Problem) -> Solution:
        """Minimise the time within the budget, without transfers."""
        began = time.perf_counter()
        search = self._search(problem, problem.budget_bytes, began)
        known = [keep_all_schedule(problem.graph)]
        if self.warm_start:
            warm = get_planner("auto{effort=1}" if search.programs() else "auto").solve(problem)
            known += warm.schedules
        if working_set_bound(problem.graph, problem.costs) > problem.budget_bytes:
            search.bound = NEVER
        search.run(known)
        if not (search.settled or shared_storages(problem.graph)):  # the programs may run out of time
            floor = bounding_model(problem.graph, problem.costs, search.model)
            known_ns = None if search.best is None else int(search.value)
            search.bound = max(search.bound, time_bound(floor, problem.budget_bytes, effort=2, known_ns=known_ns))
        best = search.best
        candidates = [best] if best is not None else [*known, self._lowest(problem, known, began).found]
        status = Status.OPTIMAL if search.settled else Status.FEASIBLE
        solution = answer("checkmate", problem, candidates, found=status)
        if solution.status is Status.UNSOLVED and search.impossible:
            return dataclasses.replace(solution, status=Status.INFEASIBLE)
        if solution.status is Status.FEASIBLE and search.bound:
            return dataclasses.replace(solution, lower_bound_ns=search.bound)
        return solution

    def least_peak(self, problem: Problem) -> Search:
        """Minimise the peak within the time limit, whatever the problem's budget. Returns the finished search."""
        began = time.perf_counter()
        known = [keep_all_schedule(problem.graph)]
        if self.warm_start:
            known.append(minimum_peak(problem.graph, problem.costs, problem.seed)[1])
        return self._lowest(problem, known, began)

    def _lowest(self, problem: Problem, known: list[Schedule], began: float) -> Search:
        search = self._search(problem, None, began)
        search.bound = working_set_bound(problem.graph, problem.costs)
        search.run(known)
        search.bound = min(search.bound, int(search.value))
        return search

    def _least_peak(self, problem: Problem) -> Solution:
        """Return the schedule with the lowest peak as an answer to the problem; ``OPTIMAL`` if no schedule peaks lower."""
        least = self.least_peak(problem)
        found = Status.OPTIMAL if least.bound == least.value else Status.FEASIBLE
        solution = answer("checkmate", problem, [least.found], found=found)
        if solution.status is Status.UNSOLVED and least.bound > problem.budget_bytes:
            solution = dataclasses.replace(solution, status=Status.INFEASIBLE)
        return dataclasses.replace(solution, lower_bound_ns=None)

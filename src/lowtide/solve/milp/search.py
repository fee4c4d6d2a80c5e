"""The programs of ``checkmate`` one after the other, until one proves what another found or time is up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lowtide.ir import Schedule, schedule_from_sequence, shared_storages, simulate
from lowtide.solve.milp.linear import Outcome, SolverOptions, SolverResult, solve_program
from lowtide.solve.milp.stages import StageModel
from lowtide.solve.model.compact import CompactGraph, compact, released_model
from lowtide.solve.model.reach import recompute_columns
from lowtide.solve.problem import Problem
from lowtide.solve.search.memory_paths import cheapest_path

MOST_RECOMPUTES = 60_000  # variables R[t, i]; above, no program is built
FULL_UP_TO = 30_000  # of them in the full form, when ``form=auto`` takes it on
STATES_UP_TO = 2_000  # and when memory states are searched besides
_TIGHTENINGS = 3
NEVER = 2**62  # a bound above every value: nothing fits
EQUAL = 1e-6  # relative difference between a time and its bound that counts as none


@dataclass(slots=True)
class Search:
    """What is known so far. ``budget_bytes`` ``None``: the least peak is looked for, and ``value`` and ``bound`` are
    bytes; otherwise nanoseconds."""

    problem: Problem
    options: SolverOptions
    form: str
    budget_bytes: int | None
    began: float
    model: CompactGraph = field(init=False)
    proving: CompactGraph = field(init=False)  # for what holds for all schedules
    exact: bool = field(init=False)
    best: Schedule | None = None
    value: float = float("inf")
    bound: int = 0

    def __post_init__(self) -> None:
        self.model = compact(self.problem.graph, self.problem.costs)
        self.proving = released_model(self.problem.graph, self.problem.costs, self.model)
        self.exact = self.proving.faithful and not shared_storages(self.problem.graph)  # those the model never renews

    @property
    def remaining(self) -> float:
        return self.options.time_limit - (time.perf_counter() - self.began)

    @property
    def found(self) -> Schedule:
        """The best, where it is known that there is one."""
        assert self.best is not None
        return self.best

    @property
    def impossible(self) -> bool:
        """Proven that nothing fits."""
        return self.bound == NEVER

    @property
    def settled(self) -> bool:
        """The best is proven to be the optimum, or that there is none."""
        return self.impossible or self.value <= self.bound * (1 + EQUAL)

    def consider(self, schedule: Schedule) -> int:
        """Keep the schedule if it fits and is the best; its peak."""
        result = simulate(self.problem.graph, self.problem.costs, schedule)
        if self.budget_bytes is None:
            value = result.peak_bytes
        elif result.peak_bytes <= self.budget_bytes:
            value = result.time_ns
        else:
            return result.peak_bytes
        if value < self.value:
            self.best, self.value = schedule, value
        return result.peak_bytes

    def consider_nodes(self, nodes: list[int], *, released: bool = False) -> int:
        sequence = self.model.sequence(nodes)
        return self.consider(schedule_from_sequence(self.problem.graph, sequence, released=released))

    def any_order(self, share: float) -> None:
        """The relaxation: a bound for the full problem, and a candidate."""
        formulation = StageModel(self.proving, self.budget_bytes, ordered=False)
        result = self._run(formulation, share)
        if self.exact:
            whole = NEVER if result.outcome is Outcome.INFEASIBLE else formulation.lower_bound(result.bound)
            self.bound = max(self.bound, whole)
        if len(result.values):
            self.consider_nodes(formulation.sequence(result.values), released=True)

    def ordered(self, reduced: bool, share: float) -> None:
        """Checkmate's program; solved again below the budget should the simulator not accept the solution."""
        spare = 0
        for _ in range(_TIGHTENINGS):
            budget = None if self.budget_bytes is None else self.budget_bytes - spare
            formulation = StageModel(self.model, budget, reduced=reduced)
            result = self._run(formulation, share)
            if not len(result.values):
                return
            peak = self.consider_nodes(formulation.sequence(result.values))
            if self.budget_bytes is None or peak <= self.budget_bytes:
                return
            spare += peak - self.budget_bytes

    def full_states(self) -> None:
        """The search over memory states, for something better than the best known; finding nothing proves it."""
        if self.budget_bytes is None:
            return self._lower_peaks()
        path = cheapest_path(self.proving, self.budget_bytes, self.value)
        if path is None:
            return
        if path.found:
            self.consider_nodes(list(path.nodes), released=True)
        if self.exact and path.found:
            self.bound = path.time_ns
        elif self.exact:
            self.bound = NEVER if self.best is None else int(self.value)

    def _lower_peaks(self) -> None:
        """The same for the peak, by halving what is between the bound and the best."""
        while self.bound < self.value and self.exact:
            budget = (self.bound + int(self.value) - 1) // 2
            path = cheapest_path(self.proving, budget, any_path=True)
            if path is None:
                return
            if path.found:
                self.consider_nodes(list(path.nodes), released=True)
            else:
                self.bound = budget + 1

    def _run(self, formulation: StageModel, share: float) -> SolverResult:
        formulation.build()
        limit = self.remaining * share
        options = dataclasses.replace(self.options, time_limit=limit, absolute_gap=formulation.absolute_gap)
        return solve_program(formulation.program, options)

    def programs(self) -> list[Callable[[], None]]:
        """What there is to solve, one after the other; nothing where the graph is too large for any program."""
        form, full = self.form, recompute_columns(self.model, reduced=False)
        attempts: list[Callable[[], None]] = []
        if form == "auto":
            form = "full" if full <= FULL_UP_TO else "reduced"
        if form == "full" and full <= MOST_RECOMPUTES:
            small = full <= STATES_UP_TO
            attempts = [partial(self.any_order, 0.5), partial(self.ordered, False, 0.5 if small else 1.0)]
            attempts += [self.full_states] if small else []
        elif form == "reduced" and recompute_columns(self.model, reduced=True) <= MOST_RECOMPUTES:
            attempts = [partial(self.ordered, True, 0.6)]
            if full <= MOST_RECOMPUTES:
                attempts += [partial(self.any_order, 1.0)]
        return attempts

    def run(self, known: list[Schedule]) -> None:
        """The programs that the form and the size of the graph ask for; ``known``: schedules to begin with."""
        for schedule in known:
            self.consider(schedule)
        attempts = self.programs()
        for index, attempt in enumerate(attempts):
            if self.settled or self.remaining <= 0:
                return
            self.problem.progress("checkmate", index / len(attempts))
            attempt()

"""How long every schedule takes at least that may move storages, and whether any fits.

Three clocks run until a *cut*, the first compute of some node, and from there on. Before it, a schedule takes as long as its
operators, and as long as the transfers there of all that is away at the cut and comes back; after it, as long as its
operators, and as long as its transfers back. So for all weights u and w between 0 and 1 it takes at least

    (1 - u) computing before + u offloading before + (1 - w) computing after + w fetching after

On a split graph (``lowtide.solve.model.split``) in which operators may run again apart from fetches, a handle that is live at
the cut stands for a storage that is away and comes back. So the relaxation of ``lowtide.solve.bounds`` with one cut bounds
that sum: computing costs ``1 - w`` of its time, a live handle ``w`` of the transfer back and ``u`` of that there, a fetch
nothing. What runs before the cut runs once in it; the rest of its time is added. Schedules in which something stays at the cut
and is fetched later cost no less than counted.

The best weights are looked for: a few of w, then around the best of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.solve.bounds import INFEASIBLE_NS, prove_time, proven_infeasible
from lowtide.solve.model.compact import CompactGraph, Numbers, compact
from lowtide.solve.model.split import MOST_NS, all_movable, split, split_for_nothing
from lowtide.solve.outcome import bounded_by, least_time_ns
from lowtide.solve.problem import Problem, Solution, Status

_FIRST = ((0.003, 0.0), (0.03, 0.0), (0.1, 0.0), (0.3, 0.0), (0.01, 0.1), (0.03, 0.1))  # w, u
_STEPS = ((2.0, 0.1), (1.4, 0.03))  # changes of both: a factor for w, a difference for u
_MOST = {1: 16, 2: 24, 3: 40}  # number of pairs tried, by effort
_MOST_OPS = 1400  # larger programs get the least effort
_FINE = 10**7  # units of a program's time, fine enough for rounding weighted times
_ROUNDING = 1e-6  # ns: more than the error of floating-point arithmetic


def bounded(problem: Problem, solution: Solution, effort: int) -> Solution:
    """``solution`` with a lower bound that holds for all schedules, whatever they move."""
    least = least_time_ns(problem)
    if not solution.status.solved:
        parts = split_for_nothing(problem.graph, problem.costs)
        proven = proven_infeasible(compact(parts.graph, parts.costs, floor=True), problem.budget_bytes)
        return replace(solution, status=Status.INFEASIBLE) if proven else solution
    bound = least
    if effort and solution.time_ns > least:
        effort = min(max(effort - 1, 1), 3) if len(problem.graph.ops) <= _MOST_OPS else 1
        bound = max(bound, moving_bound(problem, effort, solution.time_ns))
    return bounded_by(solution, bound)


def moving_bound(problem: Problem, effort: int, known_ns: int | None = None) -> int:
    """A time in nanoseconds that no schedule within the budget undercuts, whatever it moves; see the module's
    docstring. ``effort``: 1 to 3. ``known_ns``: the time of a schedule that fits; the search stops when the bound
    reaches it."""
    clocks = _Clocks(problem, known_ns)
    for pair in _FIRST:
        clocks.bound(*pair, 1)
    # A collective that begins before the cut may end after it.
    mixed = any(op.collective for op in problem.graph.ops)
    for factor, difference in _STEPS:
        before = -1
        while before < clocks.best and len(clocks.found) < _MOST[effort]:
            before, (fetching, offloading) = clocks.best, max(clocks.found, key=clocks.found.__getitem__)
            for more in (difference, -difference) if not mixed else ():
                clocks.bound(fetching, min(max(offloading + more, 0.0), 1.0), 1)
            for times in (factor, 1 / factor):
                clocks.bound(min(fetching * times, 0.95), offloading, 1)
    if effort > 1 and clocks.open:
        clocks.bound(*max(clocks.found, key=clocks.found.__getitem__), effort)
    return clocks.best


@dataclass(slots=True, eq=False)
class _Clocks:
    """The split graph, and the bounds ``found`` for pairs of w and u."""

    problem: Problem
    known_ns: int | None
    model: CompactGraph = field(init=False)
    handles: list[tuple[int, int, int]] = field(default_factory=list)  # storage in the model, ns there and back
    parts: int = field(init=False)  # parts of a nanosecond in which weighted times are counted
    before: Numbers = field(init=False)  # time of operators, collectives aside, that first run before each node
    found: dict[tuple[float, float], int] = field(default_factory=dict)
    best: int = 0

    def __post_init__(self) -> None:
        graph, costs, memory = self.problem.graph, self.problem.costs, self.problem.costs.second_memory
        if memory is None:
            raise ValueError("there is no second memory to move to")
        parts = split(graph, costs, dict.fromkeys(all_movable(graph, costs), 0), floor=True, apart=True)
        self.model = compact(parts.graph, parts.costs, floor=True)
        times = self.model.time_ns.copy()
        for node, op in enumerate(self.model.op_of_node.tolist()):
            if op in parts.fetched:
                size = int(costs.storage_bytes[parts.fetched[op]])
                transfers = (memory.offload_ns(size), memory.fetch_ns(size))
                self.handles.append((int(self.model.reads_of(node)[0]), *transfers))
            elif parts.graph.ops[op].collective:
                times[node] = 0
        self.parts = max(_FINE // max(self.model.least_ns, 1), 1)
        self.before = np.concatenate(([0], np.cumsum(times)))

    @property
    def open(self) -> bool:
        """Whether a higher bound would be of use."""
        return self.known_ns is None or self.best < self.known_ns

    def bound(self, fetching: float, offloading: float, effort: int) -> None:
        """Add the bound for a pair, unless it is known."""
        if self.open and (effort > 1 or (fetching, offloading) not in self.found):
            found = self._weighted(fetching, offloading, effort)
            self.found[fetching, offloading], self.best = found, max(self.best, found)

    def _weighted(self, fetching: float, offloading: float, effort: int) -> int:
        model, parts = self.model, self.parts
        model = model._replace(
            time_ns=_scaled(model.time_ns, parts * (1 - fetching)),
            view_time_ns=_scaled(model.view_time_ns, parts * (1 - fetching)),
            constant_ns=int(parts * (1 - fetching) * model.constant_ns),
        )
        away = np.zeros(len(model.storage_node), np.int64)
        for handle, there_ns, back_ns in self.handles:
            away[handle] = int(min(parts * (fetching * back_ns + offloading * there_ns), MOST_NS))
        budget = self.problem.budget_bytes
        proof = prove_time(model, budget, effort=effort, kept_ns=away)
        if proof.relaxed is None:
            return INFEASIBLE_NS if proof.ns >= INFEASIBLE_NS else 0
        (cut,) = proof.relaxed.program.cuts
        # Scaled times were rounded down one by one, so this does not exceed what is missing.
        missing = math.floor(parts * (fetching - offloading) * int(self.before[cut]) - _ROUNDING)
        return -(-(proof.ns + missing) // parts)


def _scaled(times: Numbers, factor: float) -> Numbers:
    return np.asarray(np.floor(factor * times), np.int64)

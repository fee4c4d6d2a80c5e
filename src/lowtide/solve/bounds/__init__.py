"""Lower bounds on the time of every schedule within a budget, and on the smallest peak.

Solves: how much recomputation no schedule can avoid. Valid for every order-preserving schedule with recomputation
anywhere, the forward pass included, any number of times; not tight in general. The relaxation
(``relaxation``) looks at the memory of a few instants only, chosen by ``cuts``; its bound follows from
multipliers (``dual``), so that no exact solver is needed, and is tightened by branching (``branch``), and by many more instants
where plans stay far above it (``refine``). What must be resident for certain (``liveness``) tightens it and bounds the peak.

Assumes a model that counts no byte too many (``CompactGraph.bounding``); the bounds of others are trivial but valid. Views
cost their time once, saved generator states nothing. Complexity: O(n^2) for liveness, then a fixed number of iterations
on programs of a few entries per node and pair of cuts. Source: the rows are those of Checkmate (Jain et al. 2020, arXiv
1910.02653, equations 1b to 1e of section 4.2) between a few stages rather than all of them, with windows of stages added.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from lowtide.errors import PlanError
from lowtide.extras import MissingExtraError
from lowtide.solve.bounds.branch import branch
from lowtide.solve.bounds.cuts import Relaxed, Trials, choose_cuts
from lowtide.solve.bounds.liveness import Liveness, liveness
from lowtide.solve.bounds.refine import refine
from lowtide.solve.bounds.relaxation import Covering
from lowtide.solve.milp.linear import INFINITY, LinearProgram, SolverOptions, solve_program
from lowtide.solve.model.compact import CompactGraph, Numbers
from lowtide.solve.model.structure import resident_bytes

INFEASIBLE_NS = 2**62
"""The time bound where no schedule fits."""

_MAX_CELLS = 400_000_000  # nodes x storages: above this, the tables of certain liveness are not worth their memory
_PEAK_STEPS = 1000  # of the bound: how finely the peak's is searched
_TOLERANCE = 1e-5  # of the program's time: above what HiGHS may be wrong by
_ROUNDING = 1e-6  # units of time: above what floating point can be wrong by


_EFFORTS = {  # what is tried for the cuts, splits x entries in branching, seconds for HiGHS where it is installed
    1: (Trials(candidates=8, screening=1_000_000, cuts=1, final=10_000_000), 0, 0.0),
    2: (Trials(candidates=12, screening=2_000_000, cuts=2, final=20_000_000), 100_000, 0.0),
    3: (Trials(candidates=16, screening=3_000_000, cuts=3, final=40_000_000), 600_000, 0.0),
    4: (Trials(candidates=20, screening=8_000_000, cuts=4, final=100_000_000), 600_000, 60.0),
    5: (Trials(candidates=24, screening=30_000_000, cuts=5, final=500_000_000), 6_000_000, 600.0),
}


_REFINED = {  # cuts, and iterations x entries of a level
    1: (12, 20_000_000),
    2: (24, 50_000_000),
    3: (45, 100_000_000),
    4: (90, 200_000_000),
    5: (180, 1_000_000_000),
}


@dataclass(frozen=True, slots=True, eq=False)
class TimeBound:
    """A bound on the time of every schedule within a budget, and what it follows from. ``ns`` is ``INFEASIBLE_NS`` where none
    fits; ``share`` is that of the recomputes in the time of all nodes."""

    model: CompactGraph
    facts: Liveness | None = None
    relaxed: Relaxed | None = None
    share: float = 0.0

    @property
    def ns(self) -> int:
        base = least_time(self.model)
        if self.facts is not None and not self.facts.feasible:
            return INFEASIBLE_NS
        times = [self.model.time_ns, self.model.view_time_ns]
        times += [] if self.facts is None or self.facts.kept_ns is None else [self.facts.kept_ns]
        unit = int(np.gcd.reduce(np.concatenate(times)))
        if unit == 0:
            return base
        # Times are multiples of the unit.
        return base + unit * max(math.ceil(self.share * int(self.model.time_ns.sum()) / unit - _ROUNDING), 0)

    def refined(self, effort: int, known_ns: int | None = None) -> TimeBound:
        """A bound at least as high, from many more instants: slower, for where ``known_ns``, the time of a schedule that fits,
        is far above. ``effort``: 1 to 5."""
        if self.facts is None or self.relaxed is None or (known_ns is not None and self.ns >= known_ns):
            return self
        if self.facts.kept_ns is not None:
            raise ValueError("what is live costs something at one cut only")
        kept = resident_bytes(self.model)[1]
        found = refine(self.facts, self.relaxed, kept, *_REFINED[effort], _enough(self.model, known_ns))
        return TimeBound(self.model, self.facts, found, max(self.share, found.dual.bound))


def time_bound(model: CompactGraph, budget_bytes: int, *, effort: int = 3, known_ns: int | None = None) -> int:
    """Nanoseconds that no schedule within ``budget_bytes`` undercuts; ``INFEASIBLE_NS`` where none fits. Raises ``PlanError``.

    ``effort``: 1 to 5. ``known_ns``: time of a schedule that fits; stops early once the bound has reached it.
    """
    return prove_time(model, budget_bytes, effort=effort, known_ns=known_ns).ns


def prove_time(
    model: CompactGraph,
    budget_bytes: int,
    *,
    effort: int = 3,
    known_ns: int | None = None,
    kept_ns: Numbers | None = None,
) -> TimeBound:
    """As ``time_bound``, with what the bound follows from, so that it can be refined. ``kept_ns``: by storage, what it costs
    besides that it is live at the one cut that is looked at then."""
    if effort not in _EFFORTS:
        raise PlanError(f"time bound: effort is {effort}, but goes from 1 to 5; write for instance effort=3")
    if not _tractable(model):
        return TimeBound(model)
    live = liveness(model, budget_bytes)
    if not live.feasible or not model.time_ns.any():
        return TimeBound(model, live)
    trials, work, seconds = _EFFORTS[effort]
    if kept_ns is not None:
        live, trials = dataclasses.replace(live, kept_ns=kept_ns), dataclasses.replace(trials, cuts=1)
    return _share_bound(live, trials, work, seconds, _enough(model, known_ns))


def _enough(model: CompactGraph, known_ns: int | None) -> float:
    """The share of recomputes at which a bound has reached what is known."""
    return math.inf if known_ns is None else (known_ns - least_time(model)) / int(model.time_ns.sum())


def peak_bound(model: CompactGraph) -> int:
    """Bytes that no schedule's peak undercuts, ``fixed_bytes`` included."""
    if not _tractable(model) or model.nodes == 0:
        return model.fixed_bytes
    low = model.fixed_bytes + int(liveness(model, 2**62).instant_bytes.max())
    high = max(low, model.fixed_bytes + int(resident_bytes(model)[1].max()))  # a budget that nothing is proven of
    while high - low > low // _PEAK_STEPS:
        middle = (low + high) // 2
        if liveness(model, middle).feasible:
            high = middle
        else:
            low = middle + 1
    return low


def proven_infeasible(model: CompactGraph, budget_bytes: int) -> bool:
    """Whether certain liveness alone shows that no schedule fits."""
    return _tractable(model) and not liveness(model, budget_bytes).feasible


def least_time(model: CompactGraph) -> int:
    """Every node and every view once."""
    inside = int(model.view_time_ns[model.views].sum())  # those of external storages are in constant_ns
    return model.least_ns + inside


def _tractable(model: CompactGraph) -> bool:
    return model.bounding and (model.nodes + 2) * max(len(model.storage_node), model.nodes) <= _MAX_CELLS


def _share_bound(facts: Liveness, trials: Trials, work: int, seconds: float, enough: float) -> TimeBound:
    relaxed = choose_cuts(facts, resident_bytes(facts.model)[1], trials, enough)
    if relaxed is None:
        return TimeBound(facts.model, facts)
    splits = work // max(len(relaxed.program.index), 1)
    share = max(branch(relaxed.program, relaxed.dual, splits, enough), 0.0)
    if seconds > 0 and share < enough:
        share = max(share, _whole_bound(relaxed.program, seconds) or 0.0)
    return TimeBound(facts.model, facts, relaxed, share)


def _whole_bound(program: Covering, seconds: float) -> float | None:
    """The relaxation's bound with whole columns after at most ``seconds``; ``None`` without HiGHS or a bound. Its cuts
    close in tenths of a second what branching alone takes minutes for. A margin well above its tolerances is taken
    off."""
    zeros, ones = np.zeros(len(program.cost)), np.ones(len(program.cost))
    matrix, most = (program.start, program.index, program.value), np.full(len(program.right), INFINITY)
    whole = LinearProgram(program.cost, zeros, ones, ones.astype(np.bool_), *matrix, program.right, most)
    try:
        result = solve_program(whole, SolverOptions(time_limit=seconds))
    except MissingExtraError:
        return None
    return result.bound - _TOLERANCE if math.isfinite(result.bound) else None

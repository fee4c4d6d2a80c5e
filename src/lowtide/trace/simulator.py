"""Replay a trace by the rules of ``lowtide.trace.replay``, as an online run would have to, and compute its peak without
a budget."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import LowtideError
from lowtide.eviction import Pool
from lowtide.notebook import Shown
from lowtide.trace.checker import check_trace
from lowtide.trace.model import Constant, OperatorCall, Pin, Release, Trace
from lowtide.trace.replay import Replay, ReplayEndError, ReplayStatus, ReplayWatcher
from lowtide.units import format_bytes, format_time

POLICIES = ("eager", "ignore", "banish")


@dataclass(frozen=True, slots=True)
class ReplayResult(Shown):
    """``base_ns``: the time of every operator, run once. ``time_ns``: the time up to the end of the replay.
    ``operator``: the one at which the replay failed. ``evictions`` counts those that made room,
    ``rematerializations`` the operators that ran again."""

    status: ReplayStatus
    budget_bytes: int
    peak_bytes: int
    base_ns: int
    time_ns: int
    evictions: int
    rematerializations: int
    operator: str = ""

    def _heading(self) -> str:
        return f"replay: {self.status.value}{f', at {self.operator}' if self.operator else ''}"

    def _facts(self) -> dict[str, str]:
        return {
            "budget": format_bytes(self.budget_bytes),
            "peak": format_bytes(self.peak_bytes),
            "time": f"{format_time(self.time_ns)}, {format_time(self.base_ns)} without evictions",
            "evictions": str(self.evictions),
            "rematerializations": str(self.rematerializations),
        }

    @property
    def slowdown(self) -> float:
        return self.time_ns / self.base_ns if self.base_ns else 1.0


def simulate(
    trace: Trace,
    budget_bytes: int,
    heuristic: str = "dtr-eq",
    *,
    policy: str = "eager",
    sample: bool = False,
    skip_small: bool = False,
    seed: int = 0,
    most_slowdown: float | None = 2.0,
    watcher: ReplayWatcher | None = None,
) -> ReplayResult:
    """Replay the trace. The replay ends if nothing more can be evicted, or if it takes more than ``most_slowdown``
    times the trace's time.

    ``watcher`` is told what runs, and what takes memory. Raises ``LowtideError`` for an unknown heuristic or policy,
    and for a trace that contradicts itself.
    """
    if policy not in POLICIES:
        raise LowtideError(f"no policy is named {policy!r}; known: {', '.join(POLICIES)}")
    check_trace(trace)
    pool = Pool(heuristic=heuristic, sample=sample, skip_small=skip_small, seed=seed)
    spare_ns = None if most_slowdown is None else (most_slowdown - 1) * trace.time_ns
    replay = Replay(pool, budget_bytes, policy, spare_ns, watcher or ReplayWatcher())
    status, operator = ReplayStatus.OK, ""
    try:
        for event in trace.events:
            replay.step(event)
    except ReplayEndError as end:
        status, operator = end.status, end.operator
    return ReplayResult(
        status,
        budget_bytes,
        replay.peak_bytes,
        trace.time_ns,
        pool.clock_ns,
        replay.evictions,
        replay.rematerializations,
        operator,
    )


def unconstrained_peak_bytes(trace: Trace) -> int:
    """The peak of the trace if nothing is evicted: each storage lives from its first tensor to its last release.
    Constants count. A write to the result of a call needs room for the new version beside the old one."""
    storage_of: dict[int, int] = {}  # tensor -> the first tensor of its storage
    sizes: dict[int, int] = {}  # first tensor -> bytes
    held: dict[int, int] = {}
    lasting: set[int] = set()
    live = peak = 0
    for event in trace.events:
        match event:
            case Constant():
                storage_of[event.tensor], sizes[event.tensor], held[event.tensor] = event.tensor, event.bytes, 1
                lasting.add(event.tensor)
                live += event.bytes
                peak = max(peak, live)
            case OperatorCall():
                for created in event.creates:
                    alias = created.alias_of
                    first = storage_of[created.tensor] = created.tensor if alias is None else storage_of[alias]
                    sizes.setdefault(first, created.bytes)
                    held[first] = held.get(first, 0) + 1
                    live += created.bytes
                    if event.once:
                        lasting.add(first)
                written = {storage_of[tensor] for tensor in event.writes} - lasting
                peak = max(peak, live + event.workspace_bytes + sum(sizes[first] for first in written))
            case Release():
                first = storage_of[event.tensor]
                held[first] -= 1
                live -= 0 if held[first] else sizes[first]
            case Pin():
                pass
    return peak

"""The interface of planners: ``Problem``, ``Solution`` and ``Planner``."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule
from lowtide.notebook import Shown
from lowtide.progress import Progress
from lowtide.units import format_bytes, format_time

Better = Callable[[int, Callable[[], "Solution"]], None]
"""Called with the time of an answer on the way, in ns, and with what makes that answer."""


class Status(enum.Enum):
    """The quality of an answer."""

    OPTIMAL = "optimal"  # no order-preserving schedule within the budget takes less time
    FEASIBLE = "feasible"  # fits the budget
    INFEASIBLE = "infeasible"  # proven: no order-preserving schedule fits the budget
    UNSOLVED = "unsolved"  # the planner found none, which proves nothing

    @property
    def solved(self) -> bool:
        return self in (Status.OPTIMAL, Status.FEASIBLE)


def check_seed(seed: object) -> None:
    """Raise ``PlanError`` unless ``seed`` is an integer of 0 or more."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or int(seed) < 0:
        raise PlanError(f"seed is {seed!r}, but must be an integer of 0 or more")


@dataclass(frozen=True, slots=True)
class Problem:
    """Find the quickest schedule of ``graph`` whose peak is at most ``budget_bytes`` (``graph.fixed_bytes``
    included). Raises ``PlanError`` for a seed that ``check_seed`` refuses.

    ``on_better`` is called with intermediate answers of a search, each quicker than those before."""

    graph: Graph
    costs: Costs
    budget_bytes: int
    seed: int = 0
    on_progress: Progress | None = None
    on_better: Better | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def progress(self, stage: str, fraction: float) -> None:
        if self.on_progress is not None:
            self.on_progress(stage, fraction)

    def better(self, time_ns: int, make: Callable[[], Solution]) -> None:
        if self.on_better is not None:
            self.on_better(time_ns, make)


def each_quicker(on_better: Better) -> Better:
    """Wrap ``on_better`` so that it is called only with answers that are quicker than all before."""
    least = math.inf

    def heard(time_ns: int, make: Callable[[], Solution]) -> None:
        nonlocal least
        if time_ns < least:
            least = time_ns
            on_better(time_ns, make)

    return heard


@dataclass(frozen=True, slots=True)
class Solution(Shown):
    """A planner's answer.

    ``peak_bytes`` and ``time_ns`` are those of ``schedule``, both 0 without one. ``lower_bound_ns`` is a proven lower bound
    on the time of every order-preserving schedule within the budget. ``minimum_bytes`` is the smallest peak of any
    schedule that this planner knows, always given if unsolved; ``lowest_schedule`` is then the schedule with the lowest peak
    that it found. ``solve_seconds`` is measured by ``lowtide.solve.solve``.
    """

    planner: str
    status: Status
    schedule: Schedule | None
    peak_bytes: int
    time_ns: int
    lower_bound_ns: int | None = None
    minimum_bytes: int | None = None
    lowest_schedule: Schedule | None = None
    solve_seconds: float = 0.0

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules that the planner found: ``schedule`` and ``lowest_schedule``, those that are given."""
        return [one for one in (self.schedule, self.lowest_schedule) if one is not None]

    def _heading(self) -> str:
        return f"{self.status.value} by {self.planner}"

    def _facts(self) -> dict[str, str]:
        solved = {"peak": format_bytes(self.peak_bytes), "time": format_time(self.time_ns)}
        facts = solved if self.schedule is not None else {}
        if self.lower_bound_ns is not None:
            facts["no schedule takes less than"] = format_time(self.lower_bound_ns)
        if self.minimum_bytes is not None:
            facts["least peak known"] = format_bytes(self.minimum_bytes)
        return {**facts, "found in": f"{self.solve_seconds:.1f} s"}


@runtime_checkable
class Planner(Protocol):
    """A planner: a frozen dataclass whose fields are its options. Its class has ``moves = True`` if its answers may move
    storages to a second memory and its bounds hold for all schedules that do."""

    def solve(self, problem: Problem) -> Solution: ...

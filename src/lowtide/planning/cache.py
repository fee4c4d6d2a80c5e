"""Plans on disk, one entry per request, so that a second start of the same program does not search again.

The key contains everything that a plan depends on: the graph without source locations, its costs, the budget, planner
and seed, the given versions, and the planners' own sources. Entries are not trusted: the schedule is checked and
simulated. If several processes ask for the same plan at once, one searches. ``LOWTIDE_PLAN_CACHE=0`` disables the
cache.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from lowtide.errors import ScheduleError
from lowtide.ir import Costs, Graph, format_graph
from lowtide.native import core
from lowtide.planning.make import Better, make_plan
from lowtide.planning.plan import Plan
from lowtide.solve import Progress
from lowtide.store import Cache, cache_folder, content_key, sources_key

FORMAT = "lowtide-cached-plan/2"
MOST_ENTRIES = 512
PATIENCE_SECONDS = 600.0  # to wait for another process that searches for the same plan
_PLANNERS = tuple(Path(__file__).parents[1] / package for package in ("ir", "solve", "place", "eviction"))
_OFF = ("0", "off", "false", "no")


def enabled() -> bool:
    """Whether the environment leaves the cache enabled."""
    return os.environ.get("LOWTIDE_PLAN_CACHE", "").strip().lower() not in _OFF


def plan_folder() -> Path:
    return cache_folder() / "plans"


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to a planner. ``versions``: of other things that the plan depends on, such as torch. ``placed``: the
    budget is for addresses."""

    graph: Graph
    costs: Costs
    budget_bytes: int
    planner: str
    seed: int
    versions: tuple[str, ...] = ()
    placed: bool = False

    @property
    def key(self) -> str:
        """Equal for requests with the same plan, in all processes."""
        settings = (self.budget_bytes, self.planner, self.seed, self.versions, self.placed)
        return content_key(
            FORMAT,
            sources_key(*_PLANNERS),
            core.sources,
            settings,
            format_graph(self.graph.without_places()),
            self.costs,
        )

    def make(self, on_progress: Progress | None = None, on_better: Better | None = None) -> Plan:
        """Run the planner. Raises ``InfeasibleBudgetError``."""
        return make_plan(
            self.graph,
            self.costs,
            budget=self.budget_bytes,
            planner=self.planner,
            seed=self.seed,
            placed=self.placed,
            on_progress=on_progress,
            on_better=on_better,
        )

    def decode(self, entry: bytes) -> Plan:
        """The plan of an entry. Raises ``ValueError`` or a ``LowtideError`` if it is not a valid plan for this
        request."""
        plan = Plan.from_json(msgspec.json.decode(entry), self.graph, self.costs)
        if plan.peak_bytes > self.budget_bytes:
            raise ScheduleError(f"it peaks at {plan.peak_bytes} bytes, over the budget of {self.budget_bytes}.")
        return dataclasses.replace(plan, budget_bytes=self.budget_bytes, seed=self.seed, cached=True)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCache:
    """The plans kept in ``folder``."""

    folder: Path = dataclasses.field(default_factory=plan_folder)

    def get(self, request: PlanRequest) -> Plan | None:
        """The plan kept for ``request``; ``None`` if there is no valid one."""
        return self._entries.get(request.key, request.decode)

    def put(self, request: PlanRequest, plan: Plan) -> None:
        self._entries.put(request.key, _encode(plan))

    def get_or_make(self, request: PlanRequest, make: Callable[[], Plan]) -> Plan:
        """The plan kept for ``request``, else the result of ``make``, which is kept. Raises what ``make`` raises."""
        return self._entries.get_or_make(request.key, request.decode, make, _encode, PATIENCE_SECONDS)

    @property
    def _entries(self) -> Cache:
        return Cache(self.folder, FORMAT, MOST_ENTRIES)


def _encode(plan: Plan) -> object:
    return plan.to_json(graph=False, costs=False)

"""The known cycles of a program and their plans, shared by all entries into one context."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lowtide.dynamic.cycles import Cycle, CycleGraph, Key, graph_of
from lowtide.dynamic.guide import Guide
from lowtide.errors import InfeasibleBudgetError
from lowtide.planning import Plan
from lowtide.planning.background import BackgroundSearch
from lowtide.planning.cache import PlanRequest
from lowtide.planning.make import plan_from
from lowtide.solve import greedy_within

_LOG = logging.getLogger(__name__)
PLANNING = ("background", "wait", "never")
_FIRST, _BETTER = "auto{effort=1}", "auto"
_AT_ONCE = 1500  # operators: a longer cycle has no plan before a search in the background has found one
_MOST_PLANS, _MOST_SEEN, _MOST_ROOMS, _MOST_WAITING = 64, 4096, 4, 16
_UNUSED = 256  # cycles after which a plan not used may be replaced
_WORSE = 2.0  # factor on rebuild time without a plan above which a plan is dropped; less may be noise
_FAR_WORSE, _NOTICED_NS = 8.0, 100_000_000  # the same in mid-cycle, and the least rebuild time that counts
_MORE = 1.05  # factor on the room planned for from which a new plan is worth a search
# Share of the room left as slack: a program may take a little more in each step, for instance for losses it keeps.
_SLACK = 0.01
_WATCHED = 8  # number of cycles watched after an unknown one


@dataclass(slots=True, eq=False)
class Known:
    """A planned cycle. ``rooms``: the bytes it was planned for, those free or evictable at its start. ``used``: number of the
    cycle in which it came last."""

    keys: list[Key]
    used: int = 0
    rooms: list[int] = field(default_factory=list)
    guides: list[Guide] = field(default_factory=list)
    rules_ns: int = 0  # the longest that rebuilds took without a plan

    def judge(self, guide: Guide, rebuild_ns: int) -> None:
        """Drop a followed plan if its rebuilds took more than ``_WORSE`` times as long as without a plan."""
        if rebuild_ns > _WORSE * self.rules_ns:
            self.guides = [one for one in self.guides if one is not guide]

    def is_far_off(self, rebuild_ns: int) -> bool:
        """Whether rebuilds in the running cycle have taken so long that its plan should be left."""
        return rebuild_ns > max(_FAR_WORSE * self.rules_ns, _NOTICED_NS)

    def guide(self, room_bytes: int | None) -> Guide | None:
        """Return the plan with the least rebuild time that fits the room, or ``None``."""
        fitting = [one for one in self.guides if room_bytes is None or one.peak_bytes <= (1 + _SLACK) * room_bytes]
        return min(fitting, key=lambda one: one.rebuild_ns, default=None)

    def is_planned_for(self, room_bytes: int) -> bool:
        """Whether the cycle was planned for about this room, or for ``_MOST_ROOMS`` already."""
        near = any(room_bytes / _MORE <= room <= (1 + _SLACK) * room_bytes for room in self.rooms)
        return near or len(self.rooms) >= _MOST_ROOMS


class Searches:
    """Background searches for better plans: one at a time, latest request first; those for forgotten cycles are dropped."""

    def __init__(self) -> None:
        self._waiting: list[_Search] = []
        self._current: tuple[_Search, BackgroundSearch[Guide]] | None = None

    def add(self, search: _Search) -> None:
        self._waiting = [*self._waiting[1 - _MOST_WAITING :], search]

    def exchange(self, known: Sequence[Known]) -> None:
        """Take the plan found meanwhile, and start the next search if none is running."""
        if self._current is not None:
            one, search = self._current
            ended = search.ended
            one.take(search.take())
            if ended:
                self._current = None
                self._waiting += one.further(search.plan)
        while self._current is None and self._waiting:
            one = self._waiting.pop()
            if not any(one.known is each for each in known):
                continue
            try:
                self._current = one, one.begin()
            except OSError as error:
                _LOG.warning("no search for a better plan can be started (%s); the plan in force stays", error)

    def stop(self) -> None:
        self._waiting = []
        if self._current is not None:
            self._current[1].stop()
            self._current = None


@dataclass(slots=True, eq=False)
class _Search:
    """Search for a first plan, or a better one than ``plan``, that rebuilds for at most ``rebuild_ns``."""

    known: Known
    cycle: CycleGraph
    request: PlanRequest
    rebuild_ns: int
    plan: Plan | None = None
    guide: Guide | None = None

    def begin(self) -> BackgroundSearch[Guide]:
        """Start the search; with little effort if there is no plan yet."""
        request = self.request if self.plan is not None else replace(self.request, planner=_FIRST)
        return BackgroundSearch(request, self.plan, functools.partial(Guide.of, self.cycle))

    def further(self, plan: Plan | None) -> list[_Search]:
        """Return the follow-up searches: after a first plan, one for better plans."""
        is_first = self.plan is None and plan is not None
        return [replace(self, plan=plan)] if is_first else []

    def take(self, guide: Guide | None) -> None:
        """Replace the previous guide by this one if it rebuilds for at most ``rebuild_ns``."""
        if guide is not None and guide.rebuild_ns <= self.rebuild_ns:
            self.known.guides = [*(one for one in self.known.guides if one is not self.guide), guide]
            self.guide = guide


class Habits:
    """Known cycles. ``evicted``: whether anything ever was; ``watch_left``: cycles still to watch if no unknown one comes."""

    def __init__(self, planning: str) -> None:
        self.planning = planning
        self.known: OrderedDict[int, Known] = OrderedDict()
        self.evicted = False
        self.watch_left = 0
        self.searches = Searches()
        self._seen: OrderedDict[int, None] = OrderedDict()  # at least once
        self._cycles = 0

    def exchange(self) -> None:
        """Take plans found meanwhile in the background."""
        self.searches.exchange([*self.known.values()])

    def find(self, keys: Sequence[Key], room_bytes: int | None) -> tuple[Known, Guide] | None:
        """Return the latest known cycle with these first keys and its plan for the room, or ``None``."""
        for known in reversed(self.known.values()):
            if known.keys[: len(keys)] == keys:
                guide = known.guide(room_bytes)
                if guide is not None:
                    return known, guide
        return None

    def ended(self, cycle: Cycle, *, as_known: bool) -> None:
        """Count an ended cycle. ``as_known``: it repeated a known one to its end; if not, the next ones are watched."""
        self._cycles += 1
        self.watch_left = max(0, self.watch_left - 1) if as_known else _WATCHED
        known = self.known.get(cycle.name)
        if known is not None:
            known.used = self._cycles
            self.known.move_to_end(cycle.name)

    def is_to_be_planned(self, cycle: Cycle, room_bytes: int | None) -> bool:
        """Whether to plan the cycle: it came before and was not planned for such room. Marks it as seen."""
        if room_bytes is None or int((1 - _SLACK) * room_bytes) < 1 or not cycle.keys or cycle.cut:
            return False
        known = self.known.get(cycle.name)
        if known is not None:
            wanted = not known.is_planned_for(room_bytes)
        else:
            oldest = next(iter(self.known.values()), None)
            wanted = len(self.known) < _MOST_PLANS or (oldest is not None and self._cycles - oldest.used > _UNUSED)
        before = cycle.name in self._seen
        self._seen[cycle.name] = None
        self._seen.move_to_end(cycle.name)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return wanted and before and len(cycle.performed) == len(cycle.keys)

    def learn(self, cycle: Cycle, room_bytes: int, rebuild_ns: int) -> None:
        """Plan a watched cycle, whose rebuilds took ``rebuild_ns``."""
        known = self.known.setdefault(cycle.name, Known(cycle.keys, self._cycles))
        known.rooms.append(room_bytes)
        known.rules_ns = max(known.rules_ns, rebuild_ns)
        while len(self.known) > _MOST_PLANS:
            self.known.popitem(last=False)
        try:
            graph = graph_of(cycle)
            request = PlanRequest(graph.graph, graph.costs, int((1 - _SLACK) * room_bytes), _BETTER, 0)
            search = _Search(known, graph, request, rebuild_ns)
            search.plan = _waited_plan(request) if self.planning == "wait" else _plan_at_once(request)
            search.take(None if search.plan is None else Guide.of(graph, search.plan))
        except Exception:  # noqa: BLE001 - whatever it is, the program goes on by the rules
            _LOG.warning("a cycle of %d operators could not be planned", len(cycle.keys), exc_info=True)
            return
        if search.plan is not None:
            _LOG.info(
                "planned a cycle of %d operators: overhead %.1f %%, peak %d bytes of %d",
                len(cycle.keys), 100 * search.plan.overhead, search.plan.peak_bytes, room_bytes,
            )  # fmt: skip
        if self.planning == "background":
            self.searches.add(search)


def _plan_at_once(request: PlanRequest) -> Plan | None:
    if len(request.graph.ops) > _AT_ONCE:
        return None
    greedy = greedy_within(request.graph, request.costs, request.budget_bytes)
    return plan_from(
        request.graph,
        request.costs,
        [] if greedy is None else [greedy],
        budget_bytes=request.budget_bytes,
        planner="auto{effort=0}",
        seed=request.seed,
    )


def _waited_plan(request: PlanRequest) -> Plan | None:
    try:
        return replace(request, planner=_FIRST).make()
    except InfeasibleBudgetError as error:
        _LOG.info("a cycle has no plan: %s", error)
        return None

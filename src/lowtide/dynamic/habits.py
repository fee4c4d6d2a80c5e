"""The cycles that a program was seen to go through, and their plans: for all entries into one context."""

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
_UNUSED = 256  # cycles, after which another one may have the place of a plan
_WORSE = 2.0  # times what rebuilds took without a plan; less may be noise
_FAR_WORSE, _NOTICED_NS = 8.0, 100_000_000  # the same in the midst of a cycle, and time that is worth it
_MORE = 1.05  # times the room that was planned for, from which another plan is worth a search
# Of the room: a program may take a little more of it from step to step, for the losses that it keeps, say.
_SLACK = 0.01
_WATCHED = 8  # cycles after one that was not known


@dataclass(slots=True, eq=False)
class Known:
    """A cycle that was planned, for each of the ``rooms`` beside what could not be evicted in its beginning. ``used``: the
    number of the cycle in which it came last."""

    keys: list[Key]
    used: int = 0
    rooms: list[int] = field(default_factory=list)
    guides: list[Guide] = field(default_factory=list)
    rules_ns: int = 0  # the longest that rebuilds took without a plan

    def judge(self, guide: Guide, rebuild_ns: int) -> None:
        """A plan was followed, and its rebuilds took that long: with far more than the rules took, it is followed no more."""
        if rebuild_ns > _WORSE * self.rules_ns:
            self.guides = [one for one in self.guides if one is not guide]

    def is_far_off(self, rebuild_ns: int) -> bool:
        """Whether rebuilds of a cycle that is under way took so long that its plan is no good."""
        return rebuild_ns > max(_FAR_WORSE * self.rules_ns, _NOTICED_NS)

    def guide(self, room_bytes: int | None) -> Guide | None:
        """The quickest plan that fits into so much room, if there is one."""
        fitting = [one for one in self.guides if room_bytes is None or one.peak_bytes <= (1 + _SLACK) * room_bytes]
        return min(fitting, key=lambda one: one.rebuild_ns, default=None)

    def is_planned_for(self, room_bytes: int) -> bool:
        """Whether there is nothing to be had by planning for so much room."""
        near = any(room_bytes / _MORE <= room <= (1 + _SLACK) * room_bytes for room in self.rooms)
        return near or len(self.rooms) >= _MOST_ROOMS


class Searches:
    """Searches for better plans: one at a time, the latest first, those for what is forgotten not at all."""

    def __init__(self) -> None:
        self._waiting: list[_Search] = []
        self._current: tuple[_Search, BackgroundSearch[Guide]] | None = None

    def add(self, search: _Search) -> None:
        self._waiting = [*self._waiting[1 - _MOST_WAITING :], search]

    def exchange(self, known: Sequence[Known]) -> None:
        """Put in force what was found meanwhile, and go on to the next one."""
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
    """For a better plan than ``plan``, or the first one, that takes less than ``rebuild_ns``."""

    known: Known
    cycle: CycleGraph
    request: PlanRequest
    rebuild_ns: int
    plan: Plan | None = None
    guide: Guide | None = None

    def begin(self) -> BackgroundSearch[Guide]:
        """Where there is no plan yet, for one that is found soon."""
        request = self.request if self.plan is not None else replace(self.request, planner=_FIRST)
        return BackgroundSearch(request, self.plan, functools.partial(Guide.of, self.cycle))

    def further(self, plan: Plan | None) -> list[_Search]:
        """What follows where it has ended with this plan: the search for better ones than the first."""
        is_first = self.plan is None and plan is not None
        return [replace(self, plan=plan)] if is_first else []

    def take(self, guide: Guide | None) -> None:
        """Put this plan in the place of the one before, if it is worth following."""
        if guide is not None and guide.rebuild_ns <= self.rebuild_ns:
            self.known.guides = [*(one for one in self.known.guides if one is not self.guide), guide]
            self.guide = guide


class Habits:
    """``evicted``: whether anything ever was; ``watch_left``: how many cycles are watched unless another surprise comes."""

    def __init__(self, planning: str) -> None:
        self.planning = planning
        self.known: OrderedDict[int, Known] = OrderedDict()
        self.evicted = False
        self.watch_left = 0
        self.searches = Searches()
        self._seen: OrderedDict[int, None] = OrderedDict()  # at least once
        self._cycles = 0

    def exchange(self) -> None:
        """Put in force what was found meanwhile."""
        self.searches.exchange([*self.known.values()])

    def find(self, keys: Sequence[Key], room_bytes: int | None) -> tuple[Known, Guide] | None:
        """A cycle that begins like this, the latest first, and its plan for so much room."""
        for known in reversed(self.known.values()):
            if known.keys[: len(keys)] == keys:
                guide = known.guide(room_bytes)
                if guide is not None:
                    return known, guide
        return None

    def ended(self, cycle: Cycle, *, as_known: bool) -> None:
        """A cycle has ended, all of it ``as_known``; after one that was not, some more are watched."""
        self._cycles += 1
        self.watch_left = max(0, self.watch_left - 1) if as_known else _WATCHED
        known = self.known.get(cycle.name)
        if known is not None:
            known.used = self._cycles
            self.known.move_to_end(cycle.name)

    def is_to_be_planned(self, cycle: Cycle, room_bytes: int | None) -> bool:
        """Whether the cycle came before, and has no plan for so much room. It counts as seen from now on."""
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
        """Plan a cycle that was watched, whose rebuilds took that long."""
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

"""What a program will do next, as far as it does what it did before.

A cycle that comes a second time is planned as a captured program is: the planners know when everything will be read again,
which no heuristic does. While the program goes through it once more, what goes and what is computed again follows the plan.
Where the program leaves every known cycle, or takes more memory than was planned, the rules of the online mode take over: they
are always in force, so a plan that is wrong costs time and nothing else.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from lowtide.dynamic.cycles import MOST_OPERATORS, Cycle, CycleGraph, Key, Performed, graph_of
from lowtide.dynamic.guide import Follower, Guide
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import Node
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.rebuild import Rebuilder
from lowtide.errors import InfeasibleBudgetError
from lowtide.memory.allocators import PeakWindow
from lowtide.planning import Plan
from lowtide.planning.background import BackgroundSearch
from lowtide.planning.cache import PlanRequest
from lowtide.planning.make import plan_from
from lowtide.solve import greedy_within

_LOG = logging.getLogger(__name__)
PLANNING = ("background", "wait", "never")
_WAITED, _BETTER = "auto{effort=1}", "auto"
_MOST_PLANS, _MOST_SEEN = 64, 4096  # cycles
_WATCHED = 8  # cycles after one that was not known
_MORE = 1.05  # times the room that was planned for, from which another plan is worth a search
_SLACK = (
    0.01  # of the room: from step to step a little more or less of it is taken, the losses that a program keeps, say
)


@dataclass(slots=True, eq=False)
class _Known:
    """A cycle that was planned. ``room_bytes``: for how much, beside what cannot be evicted in its beginning; ``guide``:
    ``None`` where no plan was found that takes less than ``rebuild_ns``, the time of rebuilds without one."""

    keys: list[Key]
    room_bytes: int
    rebuild_ns: int
    guide: Guide | None = None

    def take(self, guide: Guide | None) -> None:
        """Follow this plan from now on, if it is worth it."""
        if guide is not None and guide.rebuild_ns <= self.rebuild_ns:
            self.guide = guide

    def serves(self, room_bytes: int | None) -> bool:
        """Whether nothing better is to be had by planning again for so much room."""
        if room_bytes is None:
            return True
        wide = room_bytes > _MORE * self.room_bytes
        return not wide and (self.guide is None or self.guide.peak_bytes <= (1 + _SLACK) * room_bytes)


class Habits:
    """The cycles that a program was seen to go through, for all entries into one context."""

    def __init__(self, planning: str) -> None:
        self.planning = planning
        self.known: OrderedDict[int, _Known] = OrderedDict()
        self.seen: OrderedDict[int, None] = OrderedDict()  # at least once
        self.short = False  # of memory: something was evicted
        self.watched = _WATCHED  # how many cycles are still watched, unless there is another surprise
        self._waiting: list[tuple[_Known, Callable[[], BackgroundSearch[Guide]]]] = []
        self._search: tuple[_Known, BackgroundSearch[Guide]] | None = None

    def exchange(self) -> None:
        """Put in force what was found meanwhile; one search goes on at a time."""
        if self._search is not None:
            known, search = self._search
            ended = search.ended
            known.take(search.take())
            self._search = None if ended else self._search
        while self._search is None and self._waiting:
            known, begin = self._waiting.pop()
            try:
                self._search = known, begin()
            except OSError as error:
                _LOG.warning("no search for a better plan can be started (%s); the plan in force stays", error)

    def was_seen(self, keys: Sequence[Key]) -> bool:
        """Whether the same cycle came before; it has now."""
        name = hash(tuple(keys))
        before = name in self.seen
        self.seen[name] = None
        self.seen.move_to_end(name)
        while len(self.seen) > _MOST_SEEN:
            self.seen.popitem(last=False)
        return before

    def learn(self, keys: list[Key], cycle: CycleGraph, room_bytes: int, rebuild_ns: int) -> None:
        """Plan a cycle, whose rebuilds took that long."""
        known = self.known[hash(tuple(keys))] = _Known(keys, room_bytes, rebuild_ns)
        while len(self.known) > _MOST_PLANS:
            self.known.popitem(last=False)
        better = PlanRequest(cycle.graph, cycle.costs, int((1 - _SLACK) * room_bytes), _BETTER, 0)
        plan = _first_plan(better) if self.planning == "background" else _waited_plan(better)
        if plan is not None:
            known.take(_guide(cycle, plan))
            _LOG.info(
                "planned a cycle of %d operators: overhead %.1f %%, peak %d bytes of %d",
                len(keys), 100 * plan.overhead, plan.peak_bytes, room_bytes,
            )  # fmt: skip
        if self.planning == "background":
            begin = functools.partial(BackgroundSearch, better, plan, functools.partial(_guide, cycle))
            self._waiting.append((known, begin))

    def ended(self, keys: Sequence[Key], *, as_known: bool) -> None:
        """A cycle has ended, all of it ``as_known``; after one that was not, the next ones are watched."""
        self.watched = max(0, self.watched - 1) if as_known else _WATCHED
        name = hash(tuple(keys))
        if name in self.known:
            self.known.move_to_end(name)


def _first_plan(request: PlanRequest) -> Plan | None:
    """One that is found at once."""
    greedy = greedy_within(request.graph, request.costs, request.budget_bytes)
    schedules = [] if greedy is None else [greedy]
    return plan_from(
        request.graph,
        request.costs,
        schedules,
        budget_bytes=request.budget_bytes,
        planner="auto{effort=0}",
        seed=request.seed,
    )


def _waited_plan(request: PlanRequest) -> Plan | None:
    try:
        return replace(request, planner=_WAITED).make()
    except InfeasibleBudgetError as error:
        _LOG.info("a cycle has no plan: %s", error)
        return None


def _guide(cycle: CycleGraph, plan: Plan) -> Guide:
    return Guide.of(cycle, plan)


class Foresight:
    """Of one run: recognizes cycles as they come, follows their plans, and watches those that are not known.

    ``undisturbed``: within it, threads can be started that are none of the program's.
    """

    def __init__(
        self,
        habits: Habits,
        memory: Memory,
        rebuilder: Rebuilder,
        undisturbed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.habits = habits
        self.memory = memory
        self.rebuilder = rebuilder
        self.undisturbed = undisturbed
        self.backward = False  # whether a backward pass is under way
        self.made: list[tuple[Node, ...]] = []  # by each operator of the cycle, what can be computed again
        self._cycle: Cycle | None = None  # the current one, once it has begun
        self._room_bytes: int | None = None  # in its beginning
        self._followed: _Known | None = None
        self._follower: Follower | None = None
        self._window: PeakWindow | None = None  # around an operator that is watched
        self._evictions = self._rebuild_ns = 0  # up to the cycle
        self._evicted_bytes = 0  # up to the operator

    def before(self, operator: Operator, reads: Iterable[Node], *, backward: bool) -> None:
        """The operator comes next; ``backward``: in a backward pass."""
        if self.backward and not backward:
            self.end()
        self.backward = backward
        cycle = self._cycle or self._begin()
        place = len(cycle.keys)
        if place >= MOST_OPERATORS:
            return self._leave()
        cycle.keys.append((operator.run, *[node.size_bytes for node in reads]))
        self._recognize(cycle, place)
        if self._follower is not None:
            self._follower.before(place)
        if cycle.watched:
            self._close()
            self._evicted_bytes = self.memory.counters.evicted_bytes
            known_bytes = self.memory.pool.bytes + cycle.constant_bytes
            cycle.other_bytes.append(self.memory.meter.level_bytes - known_bytes)
            self._window = PeakWindow(self.memory.meter)

    def after(self, operator: Operator, reads: Iterable[Node], made: Sequence[Node], cost_ns: int) -> None:
        """It has run, and ``made`` these storages, versions of storages among them."""
        cycle = self._cycle
        if cycle is None or len(self.made) == len(cycle.keys):
            return
        makes = tuple([node for node in made if node.call is not None])
        self.made.append(makes)
        if self._follower is not None:
            self.memory.counters.followed += 1
            self._follower.after(len(self.made) - 1)
        if self._window is not None:
            peak_bytes = self._window.peak_bytes + self.memory.counters.evicted_bytes - self._evicted_bytes
            self._close()
            constants = tuple([node for node in made if node.call is None])
            cycle.add(Performed(operator.name, tuple(reads), makes, constants, cost_ns, peak_bytes))

    def released(self, node: Node) -> None:
        """The program let it go."""
        if self._cycle is not None and self._cycle.watched:
            self._cycle.release(node)

    def end(self) -> None:
        """Of the cycle."""
        cycle, followed, room_bytes = self._cycle, self._followed, self._room_bytes
        if cycle is None:
            return
        self.memory.release_dead()
        as_known = followed is not None and len(followed.keys) == len(cycle.keys)
        if as_known and self._follower is not None:
            self._follower.before(len(cycle.keys))
        self.abandon()
        habits = self.habits
        habits.short |= self.memory.counters.evictions > self._evictions
        if not habits.short:
            return
        habits.ended(cycle.keys, as_known=as_known)
        known = habits.known.get(hash(tuple(cycle.keys)))
        if room_bytes is None or (known is not None and known.serves(room_bytes)):
            return
        if habits.was_seen(cycle.keys) and len(cycle.performed) == len(cycle.keys):
            habits.learn(
                cycle.keys, graph_of(cycle), room_bytes, self.memory.counters.rematerialize_ns - self._rebuild_ns
            )

    def abandon(self) -> None:
        """The cycle is over, or was interrupted."""
        self._cycle = None
        self.made = []
        self.backward = False
        self._close()
        self._leave()

    def _begin(self) -> Cycle:
        with self.undisturbed():
            self.habits.exchange()
        self._evictions = self.memory.counters.evictions
        self._rebuild_ns = self.memory.counters.rematerialize_ns
        watched = self.habits.short and self.habits.watched > 0 and self.memory.limit_bytes is not None
        self._room_bytes = self.memory.room_bytes()
        self._cycle = Cycle(watched)
        return self._cycle

    def _recognize(self, cycle: Cycle, place: int) -> None:
        """Follow the plan of a known cycle that goes on as this one does, or none."""
        followed = self._followed
        if followed is None and place > 0:
            return
        if followed is not None and place < len(followed.keys) and followed.keys[place] == cycle.keys[place]:
            return
        self._leave()
        for known in reversed(self.habits.known.values()):
            if known.guide and known.serves(self._room_bytes) and known.keys[: place + 1] == cycle.keys:
                self._followed = known
                self._follower = Follower(known.guide, self.memory, self.rebuilder, self.made)
                return

    def _leave(self) -> None:
        """What comes is not planned."""
        if self._follower is not None:
            self._follower.end()
        self._followed = self._follower = None

    def _close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

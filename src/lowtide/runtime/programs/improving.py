"""Plans that improve while training runs: one background search at a time, whose plans are exchanged between calls."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time

from lowtide.lower import Lowered
from lowtide.memory.arena import Arena
from lowtide.planning import Plan
from lowtide.planning.background import BackgroundSearch
from lowtide.planning.cache import PlanRequest
from lowtide.program import Program
from lowtide.runtime.programs.entry import Entry, lowered
from lowtide.sharing.agreement import Successors

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.05


class Improving:
    """The searches for the entries of one model. The latest entry is searched first, because training uses it now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._waiting: list[tuple[Entry, PlanRequest]] = []
        self._entry: Entry | None = None
        self._search: BackgroundSearch[tuple[Plan, Lowered]] | None = None
        self._lock = threading.RLock()

    def add(self, entry: Entry, request: PlanRequest) -> None:
        """Search for a better plan for ``entry``, as ``request`` describes."""
        with self._lock:
            self._waiting.append((entry, request))
            self._begin()

    def exchange(self, called: Entry | None = None) -> None:
        """Use plans found so far, before ``called`` runs. A step that has begun ends under its old plan."""
        if self._search is None or not self._lock.acquire(blocking=False):
            return
        try:
            ended, found, entry = self._search.ended, self._search.take(), self._entry
            if found is not None and entry is not None:
                self._found(entry, *found)
            if ended and entry is not None:
                self._search = self._entry = None
                self._over(entry)
                self._begin()
        finally:
            self._lock.release()

    def drop(self, entry: Entry) -> None:
        """Remove ``entry`` from the waiting searches."""
        with self._lock:
            self._waiting = [one for one in self._waiting if one[0] is not entry]

    def _found(self, entry: Entry, plan: Plan, lowered: Lowered) -> None:
        self._put(entry, plan, lowered)

    def _over(self, entry: Entry) -> None:
        """The search for ``entry`` has ended, or could not start."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no search is left, at most ``seconds``. Returns whether that is so."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self.exchange()
            search = self._search
            if search is None:
                return True
            if not search.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                return False

    def stop(self) -> None:
        """End all searches now; plans in use stay."""
        with self._lock:
            self._waiting.clear()
            if self._search is not None:
                self._search.stop()
            self._search = self._entry = None

    def _begin(self) -> None:
        while self._search is None and self._waiting:
            entry, request = self._waiting.pop()
            try:
                self._search = BackgroundSearch(
                    request, entry.plan, functools.partial(_prepared, entry.program, entry.arena)
                )
                self._entry = entry
            except OSError as error:
                _LOG.warning("no search for a better plan can be started (%s); the plan in force stays", error)
                self._over(entry)

    def _put(self, entry: Entry, plan: Plan, lowered: Lowered) -> None:
        if plan.time_ns > entry.plan.time_ns:  # the entry got a quicker schedule meanwhile
            return
        better = plan.time_ns < entry.plan.time_ns
        entry.plan, entry.lowered = plan, lowered
        if entry.siblings is not None:
            entry.siblings.keep(entry)
        if better:
            _LOG.info(
                "planned %s better: overhead %.1f %%, peak %d bytes of %d (after %.1f s)",
                self.name, 100 * plan.overhead, plan.peak_bytes, plan.budget_bytes, plan.history[-1].seconds,
            )  # fmt: skip


class ImprovingTogether(Improving):
    """The same for several processes that train together: one process searches, and all exchange a plan at the same
    call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._led: dict[Entry, Successors] = {}
        self._heard: dict[Entry, Successors] = {}  # searched for by another process
        self._pending: dict[Entry, tuple[int, Plan, Lowered]] = {}  # the call of the exchange, and the plan
        self._next: dict[Entry, tuple[Plan, Lowered]] = {}  # to be published after the pending plan

    def add(self, entry: Entry, request: PlanRequest) -> None:
        successors = Successors(entry.program, entry.plan)
        if successors.leads:
            self._led[entry] = successors
            super().add(entry, request)
        else:
            self._heard[entry] = successors

    def exchange(self, called: Entry | None = None) -> None:
        super().exchange(called)
        if called is None:
            return
        if called in self._heard and called not in self._pending:
            self._hear(called)
        if called in self._pending and called.calls >= self._pending[called][0]:
            _, plan, lowered = self._pending.pop(called)
            self._put(called, plan, lowered)
            if called in self._next:
                self._publish(called, *self._next.pop(called))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the searches of all processes have ended. Found plans take effect a few calls later."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        ended = super().wait(seconds)
        while ended and not all(successors.have_ended() for successors in self._heard.values()):
            ended = time.monotonic() < deadline
            time.sleep(_POLL_SECONDS)
        return ended

    def drop(self, entry: Entry) -> None:
        super().drop(entry)
        self._pending.pop(entry, None)
        self._next.pop(entry, None)
        self._heard.pop(entry, None)
        if entry in self._led and entry is not self._entry:
            self._over(entry)
            del self._led[entry]

    def stop(self) -> None:
        super().stop()
        for entry in self._led:
            self._over(entry)

    def _over(self, entry: Entry) -> None:
        self._led[entry].end(len({entry} & self._next.keys()))

    def _found(self, entry: Entry, plan: Plan, lowered: Lowered) -> None:
        if entry in self._pending:
            self._next[entry] = plan, lowered
        else:
            self._publish(entry, plan, lowered)

    def _publish(self, entry: Entry, plan: Plan, lowered: Lowered) -> None:
        self._pending[entry] = self._led[entry].publish(plan, entry.calls), plan, lowered

    def _hear(self, entry: Entry) -> None:
        """Take the next plan that the leading process has published, if any."""
        successors = self._heard[entry]
        told = successors.take()
        if told is not None:
            at, found = told
            plan = entry.plan.improved(found, time.monotonic() - entry.made, entry.arena is not None)
            self._pending[entry] = at, plan, lowered(entry.program, plan, entry.arena)
        if successors.are_through:
            del self._heard[entry]


def _prepared(program: Program, arena: Arena | None, plan: Plan) -> tuple[Plan, Lowered]:
    return plan, lowered(program, plan, arena)

"""Plans that get better while training runs: one search at a time in the background, its plans exchanged between calls."""

from __future__ import annotations

import functools
import logging
import threading
import time

from lowtide.lower import Lowered, lower
from lowtide.planning import Plan
from lowtide.planning.background import BackgroundSearch
from lowtide.planning.cache import PlanRequest
from lowtide.program import Program
from lowtide.runtime.entry import Entry

_LOG = logging.getLogger(__name__)


class Improving:
    """The searches for the entries of one model. The latest entry comes first: it is the one that is being trained with."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._waiting: list[tuple[Entry, PlanRequest]] = []
        self._entry: Entry | None = None
        self._search: BackgroundSearch[tuple[Plan, Lowered]] | None = None
        self._lock = threading.RLock()

    def add(self, entry: Entry, request: PlanRequest) -> None:
        """Search for a better plan than that of ``entry``, which ``request`` asks for."""
        with self._lock:
            self._waiting.append((entry, request))
            self._begin()

    def exchange(self) -> None:
        """Put what has been found in force. Between calls: a step that has begun ends under the plan that it began with."""
        if self._search is None or not self._lock.acquire(blocking=False):
            return
        try:
            ended, found = self._search.ended, self._search.take()
            if found is not None and self._entry is not None:
                self._put(self._entry, *found)
            if ended:
                self._search = self._entry = None
                self._begin()
        finally:
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Until there is nothing left to search for, at most so many seconds; whether that is so."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self.exchange()
            search = self._search
            if search is None:
                return True
            if not search.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                return False

    def stop(self) -> None:
        """End all searches now; the plans in force stay."""
        with self._lock:
            self._waiting.clear()
            if self._search is not None:
                self._search.stop()
            self._search = self._entry = None

    def _begin(self) -> None:
        while self._search is None and self._waiting:
            entry, request = self._waiting.pop()
            try:
                self._search = BackgroundSearch(request, entry.plan, functools.partial(_prepared, entry.program))
                self._entry = entry
            except OSError as error:
                _LOG.warning("no search for a better plan can be started (%s); the plan in force stays", error)

    def _put(self, entry: Entry, plan: Plan, lowered: Lowered) -> None:
        better = plan.time_ns < entry.plan.time_ns
        entry.plan, entry.lowered = plan, lowered
        if entry.siblings is not None:
            entry.siblings.keep(entry)
        if better:
            _LOG.info(
                "planned %s better: overhead %.1f %%, peak %d bytes of %d (after %.1f s)",
                self.name, 100 * plan.overhead, plan.peak_bytes, plan.budget_bytes, plan.history[-1].seconds,
            )  # fmt: skip


def _prepared(program: Program, plan: Plan) -> tuple[Plan, Lowered]:
    return plan, lower(program, plan.schedule)

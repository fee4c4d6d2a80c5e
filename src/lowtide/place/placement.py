"""Place buffers: an offset for each, within a capacity or in as few bytes as possible, with a lower bound on these."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from lowtide.errors import PlanError, ScheduleError
from lowtide.native import core
from lowtide.notebook import Shown
from lowtide.place.buffers import Buffers, Indices, Numbers, Sections, sections
from lowtide.place.checker import fault
from lowtide.place.orders import Rule, order_keys, simple_placements
from lowtide.place.search import Search
from lowtide.solve.problem import Status, check_seed
from lowtide.units import format_bytes

MOST_VISITS = 6 * 10**8
"""Of a search that no time limit ends: seconds, and the same placement on every machine."""
_WAYS = (0.0, 0.125, 0.25, 0.5)  # capacities of parallel attempts, as fractions of the way from the bound to the best
_MOST_PAIRS = 2 * 10**8  # the most pairs of buffers that are live together: 1.6 GB of memory
_LARGE = (1e-3, 1e-4)  # the least size of a large buffer, as a fraction of the load


@dataclass(frozen=True, slots=True, eq=False)
class Placement(Shown):
    """A placement: ``offsets`` in bytes, one per buffer; empty if no placement within the capacity was found.

    ``reserved_bytes`` is the end of the highest buffer, if nothing fits the capacity that of the lowest placement found.
    ``status``: ``OPTIMAL``, no placement takes less; ``FEASIBLE``, within the capacity, if there is one; ``INFEASIBLE``,
    proven not to fit; ``UNSOLVED``, not found in the time or visits given. ``lower_bound_bytes``: no placement takes less; it
    is the load, the most bytes live at one time, unless the search has proven more. ``seconds``: duration of the search.
    """

    status: Status
    offsets: Numbers
    reserved_bytes: int
    lower_bound_bytes: int
    seconds: float

    def _heading(self) -> str:
        return f"placement: {self.status.value}"

    def _facts(self) -> dict[str, str]:
        return {
            "buffers": str(len(self.offsets)),
            "reserved": format_bytes(self.reserved_bytes),
            "no placement below": format_bytes(self.lower_bound_bytes),
            "found in": f"{self.seconds:.2f} s",
        }

    @property
    def gap(self) -> float:
        """Upper bound on the distance of ``reserved_bytes`` from the least possible, relative to ``lower_bound_bytes``."""
        return self.reserved_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def place(
    buffers: Buffers,
    capacity: int | None = None,
    *,
    start: Numbers | None = None,
    seed: int = 0,
    seconds: float = math.inf,
    most_visits: float = MOST_VISITS,
) -> Placement:
    """Place ``buffers`` within ``capacity`` bytes, or in as few bytes as can be found. ``start``: a placement known already.

    Ends after about ``most_visits`` of the search or ``seconds`` at the latest; without a time limit, equal arguments give
    equal offsets. Raises ``PlanError`` for a ``start`` that is not a valid placement, an invalid seed, and more than 200
    million pairs of buffers that are live together.
    """
    check_seed(seed)
    wrong = None if start is None else fault(buffers, start)
    if wrong:
        raise PlanError(f"the offsets that are given are no placement: {wrong}.")
    began, load = time.perf_counter(), buffers.load_bytes
    offsets, found = np.zeros(len(buffers), np.int64), [Placement(Status.OPTIMAL, np.zeros(0, np.int64), 0, 0, 0.0)]
    for part in _apart(buffers):
        piece = Buffers(buffers.lower[part], buffers.upper[part], buffers.padded[part])
        left = seconds - (time.perf_counter() - began)
        enough = max(load, *(one.reserved_bytes for one in found))
        run = _Run(piece, capacity, seed, left, most_visits, enough)
        if start is not None:
            run.keep(start[part])
        found.append(run.placement())
        solved = found[-1].status.solved
        if solved:
            offsets[part] = found[-1].offsets
        most_visits = run.visits_left if solved else 0.0
    return _joined(buffers, capacity, offsets, found, time.perf_counter() - began)


def _apart(buffers: Buffers) -> list[Indices]:
    """Split the buffers into groups that are live at disjoint times. Omits buffers of 0 bytes, which can lie anywhere."""
    there = np.flatnonzero(buffers.size)
    order = there[np.argsort(buffers.lower[there], kind="stable")]
    ends = np.maximum.accumulate(buffers.upper[order])
    cuts = np.flatnonzero(buffers.lower[order][1:] >= ends[:-1]) + 1
    return [group.astype(np.int32) for group in np.split(order, cuts) if len(group)]


def _joined(
    buffers: Buffers, capacity: int | None, offsets: Numbers, found: list[Placement], seconds: float
) -> Placement:
    """Join the placements of the groups into one."""
    lower = max(buffers.load_bytes, *(one.lower_bound_bytes for one in found))
    failed = [one.status for one in found if not one.status.solved]
    if failed:
        status = Status.INFEASIBLE if Status.INFEASIBLE in failed else Status.UNSOLVED
        return Placement(status, np.zeros(0, np.int64), max(one.reserved_bytes for one in found), lower, seconds)
    wrong = fault(buffers, offsets)
    if wrong:
        raise ScheduleError(f"a placement is wrong, which is a defect of lowtide: {wrong}")
    reserved = buffers.reserved_bytes(offsets)
    return Placement(Status.OPTIMAL if reserved <= lower else Status.FEASIBLE, offsets, reserved, lower, seconds)


class _Run:
    """The search for one group's placement, with the bound and the best so far. ``enough``: a size in bytes below which a
    lower placement gains nothing."""

    def __init__(
        self, buffers: Buffers, capacity: int | None, seed: int, seconds: float, most_visits: float, enough: int
    ) -> None:
        self.began = time.perf_counter()
        self.buffers, self.capacity, self.seconds, self.visits_left = buffers, capacity, seconds, most_visits
        self.seed, self.enough = seed, enough
        tops = np.cumsum(buffers.size)
        self.offsets, self.reserved = tops - buffers.size, int(tops[-1])  # all buffers stacked
        found = sections(buffers)
        self.lower = int(found.load_bytes.max())
        if self.flat():
            return
        _check_pairs(found)
        self.grain = int(np.gcd.reduce(buffers.size))  # offsets are sums of sizes
        self.keys = order_keys(buffers, found)
        self.native = core.Buffers(found.first, found.last, buffers.size)
        self.attempts = Search(self.native, self.keys, seed)

    def flat(self) -> bool:
        """Whether a lower placement gains nothing: this one fits and is at the bound or below ``enough``."""
        fits = self.capacity is None or self.reserved <= self.capacity
        return fits and self.reserved <= max(self.lower, self.enough)

    def done(self) -> bool:
        return self.flat() or (self.capacity is not None and self.reserved <= self.capacity)

    def hopeless(self) -> bool:
        return self.capacity is not None and self.lower > self.capacity

    def keep(self, offsets: Numbers) -> None:
        """Keep ``offsets`` if they are the best so far."""
        reserved = self.buffers.reserved_bytes(offsets)
        if reserved < self.reserved:
            self.offsets, self.reserved = offsets, reserved

    def out_of_time(self) -> bool:
        return self.visits_left <= 0 or self.seconds_left() <= 0

    def seconds_left(self) -> float:
        return self.seconds - (time.perf_counter() - self.began)

    def try_orders(self) -> None:
        for offsets in simple_placements(self.native, self.keys):
            self.keep(offsets)
            if self.done() or self.seconds_left() <= 0:
                return

    def try_large_first(self) -> None:
        """Search for a placement of the few large buffers alone, then put the small ones into the gaps."""
        size = self.buffers.size
        for share in _LARGE:
            large = np.flatnonzero(size >= share * self.lower)
            if len(large) > 0.9 * len(size) or self.done() or self.out_of_time():
                continue
            alone = Buffers(self.buffers.lower[large], self.buffers.upper[large], size[large])
            visits = min(self.visits_left / 4, MOST_VISITS / 4)
            found = place(alone, seed=self.seed, seconds=self.seconds_left() / 4, most_visits=visits)
            small = np.setdiff1d(np.arange(len(size)), large)
            order = np.concatenate([large[np.argsort(found.offsets)], small[np.argsort(-size[small], kind="stable")]])
            self.keep(self.native.fit(order.astype(np.int32), Rule.FIRST))

    def search(self) -> None:
        while not (self.done() or self.hopeless() or self.out_of_time()):
            capacities = self.capacities()
            for capacity, found in zip(
                capacities, self.attempts.within(capacities, self.visits_left, self.seconds_left()), strict=True
            ):
                self.visits_left -= found.visits
                if found.status is Status.INFEASIBLE:
                    self.lower = max(self.lower, capacity + self.grain)
                elif found.status is Status.FEASIBLE:
                    self.keep(found.offsets)

    def capacities(self) -> list[int]:
        """Return the capacities that the next attempts try: the given one, else ``_WAYS`` between the bound and the best."""
        if self.capacity is not None:
            return [self.capacity // self.grain * self.grain] * len(_WAYS)
        least = max(self.lower, self.enough // self.grain * self.grain)
        gap = self.reserved - least
        return [least + int(gap * way) // self.grain * self.grain for way in _WAYS]

    def placement(self) -> Placement:
        if not self.flat():
            self.try_orders()
            self.try_large_first()
            self.search()
        offsets = self.offsets
        status = Status.OPTIMAL if self.reserved <= self.lower else Status.FEASIBLE
        if self.capacity is not None and self.reserved > self.capacity:
            status = Status.INFEASIBLE if self.hopeless() else Status.UNSOLVED
            offsets = np.zeros(0, np.int64)
        return Placement(status, offsets, self.reserved, self.lower, time.perf_counter() - self.began)


def _check_pairs(found: Sections) -> None:
    """Raise ``PlanError`` if more than ``_MOST_PAIRS`` pairs of buffers are live together, which would take too much memory."""
    count = len(found.first)
    apart = int(np.searchsorted(np.sort(found.last), found.first, side="right").sum())
    pairs = count * (count - 1) // 2 - apart
    if pairs > _MOST_PAIRS:
        raise PlanError(
            f"{pairs} pairs of the {count} buffers are live together, more than the {_MOST_PAIRS} that can be placed; "
            "join buffers with the same lifetime, or leave out small ones."
        )

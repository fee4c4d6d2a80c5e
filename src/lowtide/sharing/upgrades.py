"""Give what is left of a shared budget to the members that gain most from it.

Every member may run by any assignment of its menu: a multiple-choice knapsack with one row per constraint. For few
members, depth-first search finds the quickest choice. For more, members change from the chosen to quicker assignments
as long as all constraints hold. The order is by time gained per additional saved byte; of equal members the later one
is first, since fewer others run while it waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowtide.sharing.assignment import Assignment
from lowtide.sharing.constraints import Constraint, Footprint, Member

_FEW = 1 << 14  # combinations that are searched completely


def upgraded(
    members: Sequence[Member],
    constraints: Sequence[Constraint],
    chosen: Sequence[Assignment],
    menus: Sequence[Sequence[Assignment]],
    budget_bytes: int,
) -> list[Assignment]:
    """``chosen`` with quicker assignments for some members. If it fits into ``budget_bytes``, so does the result."""
    if math.prod(len(menu) + 1 for menu in menus) <= _FEW:
        return quickest(
            members, constraints, [[own, *menu] for own, menu in zip(chosen, menus, strict=True)], budget_bytes
        )
    rows = _Rows(constraints, len(members))
    result = list(chosen)
    totals = rows.totals([one.footprint for one in result])
    candidates = []
    for index, (member, own) in enumerate(zip(members, chosen, strict=True)):
        for option in menus[index]:
            gain = own.time_ns(member) - option.time_ns(member)
            more = max(option.footprint.saved_bytes - own.footprint.saved_bytes, 1)
            if gain > 0:
                candidates.append((gain / more, index, option))
    for _, index, option in sorted(candidates, key=lambda one: one[:2], reverse=True):
        own, member = result[index], members[index]
        if option.time_ns(member) >= own.time_ns(member):
            continue
        tried = totals + rows.change(index, own.footprint, option.footprint)
        if int(tried.max(initial=0)) <= budget_bytes:
            result[index], totals = option, tried
    return result


def quickest(
    members: Sequence[Member],
    constraints: Sequence[Constraint],
    menus: Sequence[Sequence[Assignment]],
    budget_bytes: int,
) -> list[Assignment]:
    """One assignment per menu: of the combinations that fit, the one with the least total time, and of equals the
    first."""
    rows = _Rows(constraints, len(members))
    sizes = [[rows.of(index, one.footprint) for one in menu] for index, menu in enumerate(menus)]
    times = [[one.time_ns(member) for one in menu] for member, menu in zip(members, menus, strict=True)]
    least = [np.min(own, axis=0) for own in sizes]  # least bytes of each member in each row
    best: tuple[float, tuple[int, ...]] = (math.inf, ())

    def search(picked: tuple[int, ...], time: int, left: npt.NDArray[np.int64]) -> None:
        """Pick for the next member. ``left``: bytes left in each row, with the least of all members not picked."""
        nonlocal best
        place = len(picked)
        if time + sum(map(min, times[place:])) >= best[0]:
            return
        if place == len(menus):
            best = (time, picked)
            return
        for number in np.argsort(times[place], kind="stable").tolist():
            after = left + least[place] - sizes[place][number]
            if int(after.min(initial=0)) >= 0:
                search((*picked, number), time + times[place][number], after)

    search((), 0, budget_bytes - rows.base - sum(least, start=np.zeros_like(rows.base)))
    return [menu[number] for menu, number in zip(menus, best[1], strict=True)]


class _Rows:
    """The constraints as matrices: how often each member occurs in each of them, by role."""

    def __init__(self, constraints: Sequence[Constraint], members: int) -> None:
        shape = (len(constraints), members)
        self.base = np.array([one.base_bytes for one in constraints], dtype=np.int64)
        self.saved, self.forward, self.backward = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        for row, one in enumerate(constraints):
            for member in one.saved:
                self.saved[row, member] += 1
            if one.running >= 0:
                (self.backward if one.backward else self.forward)[row, one.running] = 1

    def totals(self, footprints: Sequence[Footprint]) -> npt.NDArray[np.int64]:
        found = self.base.copy()
        for index, footprint in enumerate(footprints):
            found += self.of(index, footprint)
        return found

    def change(self, member: int, before: Footprint, after: Footprint) -> npt.NDArray[np.int64]:
        return self.of(member, after) - self.of(member, before)

    def of(self, member: int, own: Footprint) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = (
            self.saved[:, member] * own.saved_bytes
            + self.forward[:, member] * own.forward_bytes
            + self.backward[:, member] * own.backward_bytes
        )
        return found

"""The search for plans that fit together: how much each of several programs may save between its passes.

The more the programs save, the less each recomputes, and the less room is left for the one that runs. If only that room
is tight, each program saves as much as its plan wants. Otherwise a fraction ``f`` limits it: a program saves at most
its outputs plus ``f`` of what it saves beyond them without a plan. Bisection finds the largest fraction that fits for
all. Then single programs get more or less if this saves time. Equal programs with equal fractions share a plan. If all
programs are equal, the quickest of a few fractions is taken. What is left of the budget goes to members one by one
(``sharing.upgrades``). Searches take long, failed ones longest, so their results are kept (``sharing.plans``), also
from one choice to the next.

To keep bytes free at the end of a program's forward pass, its planner is told that they are in use between its passes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Sequence

from lowtide.errors import InfeasibleBudgetError
from lowtide.planning import Plan
from lowtide.sharing.agreement import program_key
from lowtide.sharing.assignment import Assignment, Planning, Share, total_time_ns
from lowtide.sharing.constraints import Constraint, Member, peak_bytes, rooms
from lowtide.sharing.plans import Plans
from lowtide.sharing.upgrades import upgraded

_BISECTIONS, _BRIEF_BISECTIONS = 5, 3
_TRIED = 8  # fractions tried if all programs are equal
_ROUNDS, _LONGER = 2, 1  # of refinement: passes over all programs; factor on the plans made before it
_MENU = (0.25, 0.5, 0.75, 1.0)
_DOWNWARD, _LAST_TRIED = (0.5, 0.25, 0.0), 0.75  # with the least saved, room for recomputation may be missing


def choose(
    members: Sequence[Member],
    constraints: Sequence[Constraint],
    budget_bytes: int,
    planning: Planning,
    quick: Planning | None = None,
    known: tuple[Plans, Plans] | None = None,
    end: float = math.inf,
    fallback: list[Assignment] | None = None,
) -> list[Assignment]:
    """Assignments that stay within the budget and recompute little.

    ``quick``: a quicker planner for the search for shares. ``known``: results of both planners in earlier choices;
    extended here. ``end``: a time of ``time.monotonic``, after which the best assignments so far are returned, or the
    ``fallback`` from before. The same choice continues from there if made again. Raises ``InfeasibleBudgetError`` if
    nothing fits.
    """
    eager = [member.eager for member in members]
    if peak_bytes(constraints, eager) <= budget_bytes:
        return [Assignment(own) for own in eager]
    found, found_quickly = known or (Plans(), Plans())
    last = _Search(members, constraints, planning, found, end)
    search = last if quick is None else _Search(members, constraints, quick, found_quickly, end, brief=True)
    search.best = fallback
    try:
        chosen, fractions = search.alone(budget_bytes), None
        if chosen is None:
            fractions = search.fractions(budget_bytes)
            chosen = search.assignments(fractions, budget_bytes)
    except InfeasibleBudgetError:
        chosen = search.best or search.lowest(budget_bytes)
    except _EnoughError:
        assert search.best is not None
        chosen = search.best
    else:
        last.best = search.best = chosen
        with contextlib.suppress(InfeasibleBudgetError, _EnoughError):  # the quickly found result fits
            longer = last.assignments(fractions, budget_bytes) if fractions else last.alone(budget_bytes)
            chosen = longer or chosen
    return upgraded(members, constraints, chosen, search.menus(chosen, budget_bytes), budget_bytes)


class _EnoughError(Exception):
    """Time or plans are used up, and something that fits is known."""


class _Search:
    """Finds assignments from one fraction per member: the part of what it saves without a plan, beyond its outputs,
    that it may save."""

    def __init__(
        self,
        members: Sequence[Member],
        constraints: Sequence[Constraint],
        planning: Planning,
        plans: Plans,
        end: float,
        *,
        brief: bool = False,
    ) -> None:
        self.members = members
        self.constraints = constraints
        self.planning = planning
        self.brief = brief  # plans only serve to find shares
        self._programs = [program_key(member.program, member.costs) for member in members]
        self._waiting = {index for constraint in constraints for index in constraint.saved}  # for others
        plans.keep(self._programs)
        self._known = {program: plans.of(program) for program in self._programs}
        self._plans = plans
        self._end, self._most = end, math.inf  # limits: of time, and of plans in refinement
        self.best: list[Assignment] | None = None  # best that fits; once set, the search stops at ``_end``

    def alone(self, budget_bytes: int) -> list[Assignment] | None:
        """Assignments in which each member saves what its plan wants, in the room that it has if the others save
        nothing; ``None`` if this does not fit together. Raises ``InfeasibleBudgetError`` if one member does not fit
        even so."""
        limits = [member.eager.saved_bytes for member in self.members]
        found = self._assigned(limits, rooms(self.constraints, [0] * len(limits), budget_bytes), budget_bytes)
        fits = peak_bytes(self.constraints, [one.footprint for one in found]) <= budget_bytes
        return found if fits else None

    def assignments(self, fractions: Sequence[float], budget_bytes: int) -> list[Assignment]:
        """Assignments in which each member saves what its fraction allows. Equal programs with equal fractions share a
        plan. Raises ``InfeasibleBudgetError``."""
        limits = [self._limit(index, fraction) for index, fraction in enumerate(fractions)]
        found = self._assigned(limits, rooms(self.constraints, limits, budget_bytes), budget_bytes)
        peak = peak_bytes(self.constraints, [assignment.footprint for assignment in found])
        if peak > budget_bytes:
            raise _too_little(budget_bytes, peak)
        if self.best is None or self._time_ns(found) < self._time_ns(self.best):
            self.best = found
        return found

    def _assigned(self, limits: Sequence[int], left: Sequence[int], budget_bytes: int) -> list[Assignment]:
        """Assignments for members with these limits of saved bytes and these rooms. Equal members get the smallest of
        their rooms."""
        keys = list(zip(self._programs, limits, strict=True))
        least: dict[tuple[str, int], int] = {}
        for key, room in zip(keys, left, strict=True):
            least[key] = min(room, least.get(key, room))
        members = zip(self.members, keys, strict=True)
        return [self._assignment(member, key, least[key], budget_bytes) for member, key in members]

    def _limit(self, index: int, fraction: float) -> int:
        """Bytes that a member may save; as many as without a plan if no other member runs while it waits."""
        member = self.members[index]
        return member.limit_bytes(fraction) if index in self._waiting else member.eager.saved_bytes

    def _assignment(self, member: Member, key: tuple[str, int], room: int, budget_bytes: int) -> Assignment:
        limit, known = key[1], self._known[key[0]]
        found = known.made_for(room, limit)
        if found is not None:
            return found
        known.least_bytes = max(known.least_bytes, member.least_bytes, member.output_bytes + 1)
        if room < known.least_bytes:
            raise _too_little(budget_bytes, budget_bytes + known.least_bytes - room)
        found = self._planned(member, room, key, budget_bytes)
        known.add(room, limit, found)
        return found

    def _planned(self, member: Member, room: int, key: tuple[str, int], budget_bytes: int) -> Assignment:
        """A plan that takes ``room`` while the member runs, and saves at most the limit in ``key``, or more if that is
        impossible."""
        (program, limit), known = key, self._known[key[0]]
        between = max(room - limit - member.arriving_bytes, 0)
        try:
            return self._by_a_plan(member, program, Share(room, between))
        except InfeasibleBudgetError as error:
            least, missing = error.minimum_bytes, error.minimum_bytes - room
            near = self._near(member, error, room)
        if near is not None:
            return near
        try:
            if between and (missing >= between or known.met_bytes > room):
                free = self._by_a_plan(member, program, Share(room, 0))
                known.met_bytes = room
                if missing >= between or self.brief:
                    return free
            if between:
                return self._by_a_plan(member, program, Share(room, between - missing))
        except InfeasibleBudgetError as error:
            least = error.minimum_bytes
        if known.met_bytes > room:
            known.least_bytes = max(known.least_bytes, least)
        raise _too_little(budget_bytes, budget_bytes + least - room)

    def _near(self, member: Member, error: InfeasibleBudgetError, room: int) -> Assignment | None:
        """While shares are searched for: the plan in ``error`` that misses the limit by least, if it runs within
        ``room``."""
        if not self.brief or error.plan is None:
            return None
        found = _as_assigned(member, Share(room, 0), error.plan)
        return found if found.footprint.running_bytes <= room else None

    def _by_a_plan(self, member: Member, program: str, share: Share) -> Assignment:
        known = self._known[program]
        known.check(share)
        if self.best is not None and (time.monotonic() > self._end or self._plans.tried >= self._most):
            raise _EnoughError
        self._plans.tried += 1
        try:
            return _as_assigned(member, share, self.planning(member, share))
        except InfeasibleBudgetError as error:
            known.failed(share, error)
            raise

    def fractions(self, budget_bytes: int) -> list[float]:
        """Fractions that meet the budget with little recomputation. Raises ``InfeasibleBudgetError``."""
        if len(self._known) > 1:
            return self.refined(self.common_fraction(budget_bytes), budget_bytes)
        tried = [[number / _TRIED] * len(self.members) for number in range(_TRIED)]
        fitting = [one for one in tried if self._fits(one, budget_bytes)] or tried[:1]
        return min(fitting, key=lambda one: self._time_ns(self.assignments(one, budget_bytes)))

    def common_fraction(self, budget_bytes: int) -> list[float]:
        """About the largest fraction that all members can have. Raises ``InfeasibleBudgetError``."""
        high = 1.0
        for low in _DOWNWARD:
            if self._fits([low] * len(self.members), budget_bytes):
                break
            high = low
        else:
            low, high = _LAST_TRIED, 1.0
            self.assignments([low] * len(self.members), budget_bytes)
        for _ in range(_BRIEF_BISECTIONS if self.brief else _BISECTIONS):
            middle = (low + high) / 2
            fits = self._fits([middle] * len(self.members), budget_bytes)
            low, high = (middle, high) if fits else (low, middle)
        return [low] * len(self.members)

    def menus(self, chosen: Sequence[Assignment], budget_bytes: int) -> list[list[Assignment]]:
        """For each member, alternative assignments: plans that save more, plans found on the way, and no plan."""
        taken = [one.footprint.saved_bytes for one in chosen]
        most: dict[str, int] = {}
        for program, room in zip(self._programs, rooms(self.constraints, taken, budget_bytes), strict=True):
            most[program] = max(room, most.get(program, room))
        found: dict[str, list[Assignment]] = {}
        for index, (program, member) in enumerate(zip(self._programs, self.members, strict=True)):
            if program not in found:
                limits = [self._limit(index, fraction) for fraction in _MENU]
                for limit in (each for each in limits if each > taken[index]):
                    with contextlib.suppress(InfeasibleBudgetError, _EnoughError):
                        self._assignment(member, (program, limit), most[program], budget_bytes)
                made = {one.footprint: one for _, _, one in self._known[program].made}
                found[program] = [Assignment(member.eager), *made.values()]
        return [found[program] for program in self._programs]

    def refined(self, fractions: Sequence[float], budget_bytes: int) -> list[float]:
        """``fractions`` with more for some programs and less for others, as far as this saves time."""
        best, best_ns = list(fractions), self._time_ns(self.assignments(fractions, budget_bytes))
        if self._plans.most is None:
            self._plans.most = (1 + _LONGER) * self._plans.tried
        self._most = self._plans.most
        for program in [*dict.fromkeys(self._programs)] * _ROUNDS:
            same = [index for index, other in enumerate(self._programs) if other == program]
            own = best[same[0]]
            for fraction in (own / 2, (1 + own) / 2, 1.0):
                tried = [fraction if index in same else other for index, other in enumerate(best)]
                try:
                    tried_ns = self._time_ns(self.assignments(tried, budget_bytes))
                except (InfeasibleBudgetError, _EnoughError):
                    continue
                if tried_ns < best_ns:
                    best, best_ns = tried, tried_ns
        self._most = math.inf
        return best

    def _time_ns(self, chosen: Sequence[Assignment]) -> int:
        return total_time_ns(chosen, self.members)

    def _fits(self, fractions: Sequence[float], budget_bytes: int) -> bool:
        """Whether the budget is met with these fractions."""
        try:
            self.assignments(fractions, budget_bytes)
        except InfeasibleBudgetError:
            return False
        return True

    def lowest(self, budget_bytes: int) -> list[Assignment]:
        """Assignments whose peak is about the lowest possible. Raises ``InfeasibleBudgetError`` if it is above the
        budget."""
        first = {program: index for index, program in reversed([*enumerate(self._programs)])}
        options = {program: self._lowest(index) for program, index in first.items()}
        chosen = {program: own[0] for program, own in options.items()}

        def peak(changed: str, option: Assignment) -> int:
            tried = chosen | {changed: option}
            return peak_bytes(self.constraints, [tried[program].footprint for program in self._programs])

        for program in [*options] * _ROUNDS:
            chosen[program] = min(options[program], key=functools.partial(peak, program))
        found = [chosen[program] for program in self._programs]
        least = peak_bytes(self.constraints, [one.footprint for one in found])
        if least > budget_bytes:
            raise _too_little(budget_bytes, least)
        return found

    def _lowest(self, index: int) -> list[Assignment]:
        """Assignments of a member with little memory: the lowest while it runs, the lowest while it runs that also
        saves little while it waits, and no plan."""
        member = self.members[index]
        share, found = Share(member.least_bytes, 0), [Assignment(member.eager)]
        for _ in range(2 if index in self._waiting else 1):
            room = share.budget_bytes
            try:
                found.append(self._by_a_plan(member, self._programs[index], share))
            except InfeasibleBudgetError as error:
                room = error.minimum_bytes
                if error.plan is not None:
                    found.append(_as_assigned(member, share, error.plan))
            share = Share(room, max(room - self._limit(index, 0.0) - member.arriving_bytes, 0))
        return found[::-1]


def _as_assigned(member: Member, share: Share, plan: Plan) -> Assignment:
    return Assignment(member.footprint(plan.schedule), share, plan)


def _too_little(budget_bytes: int, minimum_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no plans of the programs fit into {budget_bytes} bytes together; about {minimum_bytes} bytes would do. Raise the "
        "budget, or make the batch or the sequence smaller.",
        minimum_bytes=minimum_bytes,
    )

"""One budget for several programs of a step: graphs of ``torch.compile``, or parts of a model.

Graphs run in order in the forward pass and in reverse in the backward pass. While graph i runs, the graphs before it
hold what they saved and what they returned, and the graphs after it have left gradients behind: those of parameters stay (one
per parameter, however many graphs read it), those of what an earlier graph returned stay until it takes them. Python code
between the graphs may hold memory, too; that is measured, where a pass of a graph begins. So the step fits where, for every i::

    between(i) + sum of saved(j) for j < i  +  peak(i)  +  gradients left by j > i   <=   budget

and where no gap between them took more than the rest of the budget. A graph becomes known when it is first called: it gets a
first plan for what the graphs before it leave, which saves the share that graphs have been given so far (at first, as little
as it can) where others will follow. Where that does not suffice, the step goes on with its lowest plan (said in the log).
After a step with first plans, and after one that did not fit (a graph ran twice, say, or at another shape), all are planned
together, by one search. A budget in percent grows with the graphs that are known, so the first cannot fail it either.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from lowtide.budget import is_percentage
from lowtide.cost import analytical_costs
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Costs
from lowtide.pipeline import program_costs
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.sizes import check_device
from lowtide.runtime.calls.call import ModelCall
from lowtide.runtime.parts.between import HeldBetween
from lowtide.runtime.parts.forward_pass import ForwardPass, Passes, gradients_of, left_gradient_bytes, note_released
from lowtide.runtime.parts.joint_search import JointSearch
from lowtide.runtime.parts.room import Measuring, Room, Spare, plan_in_room
from lowtide.runtime.parts.step_record import Gap, StepRecord
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry
from lowtide.settings import Settings, searches
from lowtide.sharing import Assignment, Footprint, Member, sequential_constraints
from lowtide.sharing.assignment import plan_alone, saved_fraction
from lowtide.sharing.pass_budget import StepBudget

_LOG = logging.getLogger(__name__)


class SharedBudget:
    """``ran`` are the forward passes of the current step, in order: a graph may run several times, by different plans, too.
    What waits from earlier steps (a loss that is kept) is a part of every step."""

    def __init__(self, settings: Settings, what: str = "graphs") -> None:
        self.settings, self.what, self.budget = settings, what, StepBudget(settings)  # what: programs are, for messages
        self.search = JointSearch(settings, brief=settings.planning == "background")  # since training waits for it
        self.give_way: Callable[[int], bool] | None = None  # asked for so many bytes, whether the next step needs less
        self.steps = 0
        self.ran, self.gaps = Passes(), list[Gap]()
        self.record = StepRecord()
        # Whether steps differ, so that all are planned as the fullest: adds what may run as well to the passes of a record.
        self.expected: Callable[[list[ForwardPass]], list[ForwardPass]] | None = None
        # Met: a step stayed within the budget, or was planned to. First plans: whether the current step runs by one.
        self.exceeded = self._said_over = self._met = self._first_plans = False
        self.postponed = False  # planning all together waits for a step: what runs may be none of the graphs then
        self.unlike = False  # what ran as it is in the current step is to run by plans: it tells nothing of others
        self.must_fit = False  # since something else can be done where they do not
        self.fraction = 0.0  # of what graphs would save, the part that they save by the plans in force
        self.between = HeldBetween()
        self.spare = Spare(lambda: -self.record.exceeds(self.member, self.budget)[0] if self.record else sys.maxsize)
        self._measuring = Measuring()
        self._known: dict[Entry, tuple[Member, Footprint]] = {}  # what each takes by its plan
        # Told of the end of a backward pass; in a call that says when it begins; in a backward pass that graphs run in.
        self._ending = self._within = self._nested = False

    @contextlib.contextmanager
    def call(self, device: torch.device) -> Iterator[None]:
        """The call of a model, inside of which all graphs run: what is allocated before the first of them counts, too."""
        self._begin(device)
        self._within = True
        try:
            yield
        finally:
            self._within = False
            self.ran.stay()

    def begin_nested(self) -> None:
        """In the backward pass, code between the graphs runs until ``end_nested`` that may call some of them."""
        self._nested = True

    def end_nested(self) -> None:
        self._nested = False
        self._end_gap()

    def _begin(self, device: torch.device) -> None:
        """In a new step where most of what ran waits no more for its backward pass."""
        self.between.device = device
        self._ending = False  # also after a backward pass that failed
        self._end_gap(noted=False)  # whatever ran since: the optimizer, say
        pending = self.ran.pending()
        if 2 * len(pending) <= len(self.ran):
            whole, fits = self._note_step(), self._fits()
            self._met |= whole and fits and not self.exceeded and bool(self.record)
            if (self.exceeded or self._first_plans or not fits) and whole and not self.postponed:
                self._replan()
            elif seconds := self.search.due_seconds:
                self.improve(seconds)
            self.steps, self.unlike = self.steps + 1, False
            self.gaps.clear()
            self.spare.begin_step()
            for one in pending:
                one.backward_between_bytes = None
            self.between.begin_step(self._saved_bytes(pending))
        else:
            self.between.count()
        self.ran = Passes(pending)
        self.between.watch()

    def enter(self, device: torch.device) -> None:
        """A graph is about to run."""
        if not self._within and not self._nested:
            self._begin(device)
            self._end_gap()
            return
        self.between.device = device
        self._end_gap()
        self.count()

    def count(self) -> None:
        """Whatever is allocated now is held by code between the graphs."""
        if self._nested or not all(one.is_pending for one in self.ran):
            self.between.count_all(self._saved_bytes(self.ran.pending()))
        else:
            self.between.count()

    def add(self, graph: Planned, entry: Entry, inputs: Sequence[torch.Tensor], call: ModelCall | None) -> None:
        """``graph`` ran by ``entry``."""
        if call is not None:
            key = (id(graph), sum(1 for other in self.ran if other.graph is graph))
            beside = tuple(one.key for one in self.ran.pending())
            one = ForwardPass(key, graph, entry, weakref.ref(call), max(self.between.bytes, 0), beside=beside)
            one.waiting = beside if self._nested else None
            one.gradients = tuple(gradients_of(self.member(one)[0], inputs, self.ran))
            call.on_backward = functools.partial(self._measure_between, one)
            call.on_end = self._begin_gap
            self.ran.append(one)
            self.spare.take(call.copies.values())
        self.go_on()

    def go_on(self) -> None:
        self._end_gap()
        self.between.go_on()

    def _begin_gap(self) -> None:
        self._end_gap()
        self.between.watch()

    def _end_gap(self, noted: bool = True) -> None:
        """Note what code between graphs held at most, beside what graphs wait with."""
        peak_bytes = self.between.watched()
        if peak_bytes is not None and noted:
            waiting = tuple(self.ran.pending())
            self.gaps.append((max(peak_bytes - self._saved_bytes(waiting), 0), waiting))

    def _saved_bytes(self, waiting: Sequence[ForwardPass]) -> int:
        return sum(self.member(one)[1].saved_bytes for one in waiting)

    def in_backward(self) -> None:
        """A backward pass is under way, at the end of which the last gap ends."""
        if not self._ending:
            self._ending = True
            if is_percentage(self.settings.given):
                note_released(self.ran.pending(), lambda one: self.member(one)[0])
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._ending = False
        self._end_gap()
        if self._nested:
            self.between.watch()

    def _measure_between(self, one: ForwardPass) -> None:
        """Its backward pass is about to begin: what is held by nobody that the plans know of?"""
        self._end_gap()
        self.in_backward()
        self.ran.begin_backward(one, early=self._within)
        now = self.between.now()
        if now is None or one not in self.ran or (len(self.ran) < 2 and one.waiting is None):
            return
        place = self.ran.index(one)
        (member, _), *later = map(self.member, self.ran[place:])
        expected = self.ran.left_bytes()[place] + member.arriving_bytes
        if any(other.waiting is not None for other in self.ran[place:]):  # the order is another one
            now = self.between.beside(self._saved_bytes(self.ran.pending())) or 0
        else:
            now += sum(taken.saved_bytes for _, taken in later)
        one.backward_between_bytes = max(now - expected, one.backward_between_bytes or 0)

    def member(self, one: ForwardPass) -> tuple[Member, Footprint]:
        """The program of a pass, and what it takes by its plan."""
        entry = one.entry
        if entry not in self._known:
            member = Member(entry.program, entry.plan.costs)
            self._known[entry] = member, member.footprint(entry.plan.schedule)
        return self._known[entry]

    def plan(
        self, graph: Planned, program: Program, replaced: Entry | None, more_follow: bool, costs: Costs | None = None
    ) -> Plan:
        """A plan for a program of ``graph``, in the place of ``replaced``, within what the forward passes before this one, and
        code between them, leave of the budget. ``more_follow``: other graphs run after it. New sizes of a graph that is known
        are no reason to plan all again where steps differ anyway."""
        first_plans = self._first_plans
        if costs is None:
            with self.measuring(replaced, more_follow):
                costs = program_costs(program)
        try:
            return self._plan(graph, Member(program, costs), replaced, more_follow)
        finally:
            if graph.entries and self.expected is not None:
                self._first_plans = first_plans

    def measuring(self, replaced: Entry | None, more_follow: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, operators are measured within what is left of the budget; others in the plan for the next step."""
        return self._measuring.within(
            lambda program: self._room(Member(program, analytical_costs(program)), replaced, more_follow).bytes
        )

    def _room(self, own: Member, replaced: Entry | None, more_follow: bool) -> Room:
        earlier, between = self._before(replaced)
        known = list(map(self.member, earlier))
        members = [*(member for member, _ in known), own]
        bases = [*(one.between for one in earlier), (between, between)]
        constraints = sequential_constraints(range(len(members)), bases, [*left_gradient_bytes(earlier), 0])
        budget, reserve = self.budget.of(members, constraints)
        left = budget - between - sum(taken.saved_bytes for _, taken in known)
        known_later = more_follow and is_percentage(self.settings.given) and not self.budget.granted_bytes
        if known_later:  # of what is not known yet
            left = max(left, own.keep_all.forward_bytes, own.keep_all.backward_bytes)
        more_can_be_done = self.must_fit or (self.give_way is not None and between > 0)
        must_fit = not earlier and not known_later and not more_can_be_done
        return Room(left, budget + reserve, reserve + between, len(members), must_fit)

    def _plan(self, graph: Planned, own: Member, replaced: Entry | None, more_follow: bool) -> Plan:
        room = self._room(own, replaced, more_follow)
        check_device(own.program, room.total_bytes)
        try:
            fraction = self.record.fraction_of(graph, self.member, self.fraction) if more_follow else 1.0
            plan = plan_in_room(own, self.settings, max(room.bytes, 1), fraction)
        except InfeasibleBudgetError as error:
            if room.must_fit:
                raise error.beside(room.beside_bytes) from None
            _LOG.warning(
                "%s %d of the step needs %d bytes and has %d left: this step may exceed the budget; all are replanned",
                self.what.removesuffix("s"), room.number, error.minimum_bytes, room.bytes,
            )  # fmt: skip
            self.exceeded = True
            plan = plan_in_room(own, self.settings, error.minimum_bytes, 0.0, known=error.plan)
        self._first_plans = self._first_plans or (plan.overhead > 0 and searches(self.settings.planner))
        return plan

    def _before(self, replaced: Entry | None) -> tuple[list[ForwardPass], int]:
        """What ran before ``replaced``, or before now, and what code between held then."""
        place = next((place for place, one in enumerate(self.ran) if one.entry is replaced), None)
        between = max(self.between.bytes, 0) if place is None else self.ran[place].between_bytes
        return Passes(self.ran[:place]).pending(), between

    def _note_step(self) -> bool:
        """For the plans of the next one. Whether that will be like it: what ran in it and is no graph any more will not."""
        if self.unlike:
            return False
        if self.expected is None:
            self.record.replace(self.ran, self.gaps)
            return True
        whole = all(one.graph.entries for one in self.ran)
        if whole:
            self.record.merge(self.ran, self.gaps, lambda one: self.member(one)[0].eager.saved_bytes)
        self.record.expect(self.expected)
        return whole

    def _fits(self) -> bool:
        """Whether what ran stays within the budget together. Of one in percent, a step that takes less (of a short last batch,
        say) may have the memory of the one that took most."""
        if not self.record.are_several:
            return True
        over, budget = self.record.exceeds(self.member, self.budget)
        if is_percentage(self.settings.given):
            self.budget.granted_bytes = budget
        if self.record.passes and over > 0 and not (self.exceeded or self._first_plans):
            _LOG.warning(
                "the %d %s of the step exceed the budget of %d bytes by %d (code between: up to %d): all are replanned",
                len(self.record.passes), self.what, budget, over, self.record.most_between,
            )  # fmt: skip
        return over <= 0

    def _replan(self) -> None:
        """Plan all that ran in the last step together."""
        self.exceeded = self._first_plans = False
        members, constraints = self.record.together(self.member)
        self._known.clear()
        if not self.record:  # the step was broken off
            return
        budget, reserve = self.budget.of([*members.values()], constraints)
        members |= self._measuring.made_up_for(members, budget)
        try:
            chosen = self.search.first([*members.values()], constraints, budget)
            self._met = True
        except InfeasibleBudgetError as error:
            if not self.budget.stretches(error.minimum_bytes, budget) and self._gives_up(error, budget, reserve):
                return
            self.budget.granted_bytes = error.minimum_bytes
            chosen = self.search.first([*members.values()], constraints, error.minimum_bytes)
        self._exchange(members, chosen)

    def _gives_up(self, error: InfeasibleBudgetError, budget: int, reserve: int) -> bool:
        """Where no plans fit: whether something else is done in the next step, or nothing can be. Raises where that is all."""
        if self.give_way is not None and self.give_way(error.minimum_bytes - budget):
            self.exceeded, self.record = True, StepRecord()
            return True
        unmet = self.record.infeasible(error, self.what, budget).beside(reserve)
        passes = self.record.passes
        nothing_planned = not passes and is_percentage(self.settings.given)  # at first most has not been seen
        if not nothing_planned and (not passes or self.must_fit or not self._met):
            raise unmet from None
        if not nothing_planned or (self.steps > 1 and not self._said_over):
            self._said_over = True
            _LOG.warning("training goes on over its budget, as low as it can: %s", str(unmet))
        return nothing_planned

    def improve(self, seconds: float) -> None:
        """Go on with the search for plans of all for so many seconds, between two steps."""
        members, constraints = self.record.together(self.member)
        budget, _ = self.budget.of([*members.values()], constraints)
        chosen = self.search.further([*members.values()], constraints, budget, seconds)
        if chosen is not None:
            self._known.clear()
            self._exchange(members, chosen)

    def finish(self, seconds: float | None = None) -> bool:
        """Go on with that search to its end, at most so many seconds, unless a step is under way; whether it has come."""
        if not (self.search.ended or self._within or self._nested or self._ending or self.ran.pending()):
            self.improve(math.inf if seconds is None else seconds)
        return self.search.ended

    def _exchange(self, members: Mapping[Entry, Member], chosen: Sequence[Assignment]) -> None:
        self.fraction = saved_fraction([one.footprint for one in chosen], [*members.values()])
        self.record.exchange(dict(zip(members, map(plan_alone, chosen, members.values()), strict=True)))

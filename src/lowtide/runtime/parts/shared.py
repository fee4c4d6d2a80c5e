"""One budget for several programs of a step: graphs of ``torch.compile``, or parts of a model.

Graphs run in order in the forward pass and in reverse order in the backward pass. While graph i runs, the graphs before
it hold what they saved and returned. The graphs after it have left gradients: those of parameters stay (one per
parameter, however many graphs read it), those of an earlier graph's results stay until that graph takes them. Python
code between the graphs may hold memory too; it is measured when a pass of a graph begins. So the step fits if for every
i::

    between(i) + sum of saved(j) for j < i  +  peak(i)  +  gradients left by j > i   <=   budget

and no gap between two graphs takes more than the rest of the budget. A graph becomes known when it is first called. It
gets a first plan for what the graphs before it leave. If other graphs follow, this plan saves the same share as the
graphs so far (at first, as little as possible). If this does not fit, the step goes on with the graph's lowest plan,
with a warning in the log. After a step with first plans, or one that did not fit (a graph ran twice, say, or at another
shape), one search plans all graphs together. A budget in percent grows with the known graphs, so the first graph does
not fail it either.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence

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
from lowtide.runtime.parts.current_step import CurrentStep
from lowtide.runtime.parts.forward_pass import ForwardPass, Passes, left_gradient_bytes
from lowtide.runtime.parts.joint_search import JointSearch
from lowtide.runtime.parts.room import FirstPlans, Measuring, Room, Spare
from lowtide.runtime.parts.step_record import StepRecord
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry
from lowtide.settings import Settings, searches
from lowtide.sharing import Assignment, Member, sequential_constraints
from lowtide.sharing.assignment import plan_alone, saved_fraction
from lowtide.sharing.pass_budget import StepBudget

_LOG = logging.getLogger(__name__)


class SharedBudget(CurrentStep):
    """Plans the graphs of a step, and those of the next step from the ``record`` of what ran. ``what``: what to call
    them in messages. ``expected``: set if steps differ; adds passes that may run too to a record, so that all plans
    suit the fullest step. ``give_way``: called with missing bytes, returns whether the next step will need less."""

    def __init__(self, settings: Settings, what: str = "graphs") -> None:
        super().__init__(settings)
        self.what = what
        self.budget = StepBudget(settings)
        self.search = JointSearch(settings, brief=settings.planning == "background")  # training waits for it
        self.give_way: Callable[[int], bool] | None = None
        self.expected: Callable[[list[ForwardPass]], list[ForwardPass]] | None = None
        self.record = StepRecord()
        self.exceeded = False  # a plan of this step needs more than the budget had left
        self.postponed = False  # do not plan all together after this step: some graphs may not stay
        self.unlike = False  # something ran without a plan in this step only: it is no model for others
        self.must_fit = False  # raise if plans do not fit: there is an alternative
        self.grows = False  # the budget is a percentage and may grow with the next step
        self.fraction = 0.0  # saved bytes by current plans / saved bytes without plans
        self.spare = Spare(lambda: -self.record.exceeds(self.member, self.budget)[0] if self.record else sys.maxsize)
        self._measuring, self._first = Measuring(), FirstPlans(settings)
        self._met = False  # a step was within the budget, or plans for it are
        self._first_plans = False  # the current step uses one
        self._said_over = False

    def _step_ended(self) -> None:
        if not self.broken_off:  # an incomplete step is no model for others
            self._learn()
        self.unlike = False
        self.spare.begin_step()

    def _learn(self) -> None:
        """After a step: decide whether to make new plans for the next ones."""
        whole, fits = self._note_step(), self._fits()
        self._met |= whole and fits and not self.exceeded and bool(self.record)
        if (self.exceeded or self._first_plans or not fits) and whole and not self.postponed:
            self._replan()
        elif seconds := self.search.due_seconds:
            self.improve(seconds)

    def add(self, graph: Planned, entry: Entry, inputs: Sequence[torch.Tensor], call: ModelCall | None) -> None:
        super().add(graph, entry, inputs, call)
        if call is not None:
            self.spare.take(call.copies.values())

    def plan(
        self, graph: Planned, program: Program, replaced: Entry | None, more_follow: bool, costs: Costs | None = None
    ) -> Plan:
        """A plan for a program of ``graph`` (in place of ``replaced``) within what earlier forward passes and the code
        between leave of the budget. ``more_follow``: other graphs run after it. If steps differ anyway, new sizes of a
        known graph do not trigger a new plan for all."""
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
        """A context in which operators are measured within what is left of the budget. Those that need more get
        estimated costs until the plan for the next step."""
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
        known_later = more_follow and is_percentage(self.settings.given)  # the budget depends on graphs that follow
        if known_later and not self.budget.granted_bytes:
            left = max(left, own.keep_all.forward_bytes, own.keep_all.backward_bytes)
        more_can_be_done = self.must_fit or (self.give_way is not None and between > 0)
        must_fit = not earlier and not known_later and not more_can_be_done
        return Room(left, budget + reserve, reserve + between, len(members), must_fit)

    def _plan(self, graph: Planned, own: Member, replaced: Entry | None, more_follow: bool) -> Plan:
        room = self._room(own, replaced, more_follow)
        check_device(own.program, room.total_bytes)
        try:
            fraction = self.record.fraction_of(graph, self.member, self.fraction) if more_follow else 1.0
            plan = self._first.plan(own, max(room.bytes, 1), fraction)
        except InfeasibleBudgetError as error:
            if room.must_fit:
                raise error.beside(room.beside_bytes) from None
            _LOG.warning(
                "%s %d of the step needs %d bytes and has %d left: this step may exceed the budget; all are replanned",
                self.what.removesuffix("s"), room.number, error.minimum_bytes, room.bytes,
            )  # fmt: skip
            self.exceeded = True
            plan = self._first.lowest(own, error)
        self._first_plans = self._first_plans or (plan.overhead > 0 and searches(self.settings.planner))
        return plan

    def left_bytes(self) -> int:
        """What the budget leaves beside what the current step holds. A budget in percent is unknown during the first
        step, so it counts as unlimited."""
        held = self.between.beside(0) or 0
        if is_percentage(self.settings.given) and not self.budget.granted_bytes:
            return sys.maxsize
        return self.budget.of_plain(held) - held

    def _before(self, replaced: Entry | None) -> tuple[list[ForwardPass], int]:
        """The forward passes before ``replaced`` (or before now), and the bytes that code between held then."""
        place = next((place for place, one in enumerate(self.ran) if one.entry is replaced), None)
        between = max(self.between.bytes, 0) if place is None else self.ran[place].between_bytes
        return Passes(self.ran[:place]).pending(), between

    def _note_step(self) -> bool:
        """Record the step for the next plans. Returns whether the next step will be like it; if a graph that ran is no
        longer one, it will not."""
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
        """Whether the passes that ran stay within the budget together. For a budget in percent, a smaller step (a short
        last batch, say) may use as much memory as the largest one."""
        if not self.record.are_several:
            return True
        over, budget = self.record.exceeds(self.member, self.budget)
        if is_percentage(self.settings.given) and not self.postponed:  # some parts that ran may not stay parts
            self.budget.granted_bytes = budget
        if self.record.passes and over > 0 and not (self.exceeded or self._first_plans):
            _LOG.warning(
                "the %d %s of the step exceed the budget of %d bytes by %d (code between: up to %d): all are replanned",
                len(self.record.passes), self.what, budget, over, self.record.most_between,
            )  # fmt: skip
        return over <= 0

    def _replan(self) -> None:
        """Plan all graphs of the last step together."""
        self.exceeded = self._first_plans = False
        members, constraints = self.record.together(self.member)
        self._known.clear()
        if not self.record:  # the step was incomplete
            return
        budget, reserve = self.budget.of([*members.values()], constraints)
        members |= self._measuring.made_up_for(members, budget)
        try:
            chosen = self.search.first([*members.values()], constraints, budget)
            self._met = True
        except InfeasibleBudgetError as error:
            if self.grows:
                self.exceeded = True  # plan again after the larger step
                return
            if not self.budget.stretches(error.minimum_bytes, budget) and self._gives_up(error, budget, reserve):
                return
            self.budget.granted_bytes = error.minimum_bytes
            chosen = self.search.first([*members.values()], constraints, error.minimum_bytes)
        self._exchange(members, chosen)

    def _gives_up(self, error: InfeasibleBudgetError, budget: int, reserve: int) -> bool:
        """No plans fit. Returns whether the next step will do without new ones, because it needs less or too little is
        known yet; raises the error if nothing else can be done."""
        if self.give_way is not None and self.give_way(error.minimum_bytes - budget):
            self.exceeded, self.record = True, StepRecord()
            return True
        unmet = self.record.infeasible(error, self.what, budget).beside(reserve)
        passes = self.record.passes
        nothing_planned = not passes and is_percentage(self.settings.given)  # too little of the step is known
        if not nothing_planned and (not passes or self.must_fit or not self._met):
            raise unmet from None
        if not nothing_planned or (self.steps > 1 and not self._said_over):
            self._said_over = True
            _LOG.warning("training goes on over its budget, as low as it can: %s", str(unmet))
        return nothing_planned

    def improve(self, seconds: float) -> None:
        """Continue the search for joint plans between two steps, for so many seconds."""
        members, constraints = self.record.together(self.member)
        budget, _ = self.budget.of([*members.values()], constraints)
        chosen = self.search.further([*members.values()], constraints, budget, seconds)
        if chosen is not None:
            self._known.clear()
            self._exchange(members, chosen)

    def finish(self, seconds: float | None = None) -> bool:
        """Continue that search to its end, at most ``seconds``, unless a step is running. Returns whether it has
        ended."""
        if not (self.search.ended or self._within or self._nested or self._ending or self.ran.pending()):
            self.improve(math.inf if seconds is None else seconds)
        return self.search.ended

    def _exchange(self, members: Mapping[Entry, Member], chosen: Sequence[Assignment]) -> None:
        self.fraction = saved_fraction([one.footprint for one in chosen], [*members.values()])
        self.record.exchange(dict(zip(members, map(plan_alone, chosen, members.values()), strict=True)))

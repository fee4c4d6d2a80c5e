"""One budget for several graphs of a step.

Graphs run in order in the forward pass and in reverse in the backward pass. While graph i runs, the graphs before it
hold what they saved and what they returned, and the graphs after it have left gradients behind: those of parameters stay (one
per parameter, however many graphs read it), those of what an earlier graph returned stay until it takes them. Python code
between the graphs may hold memory, too; that is measured, where a pass of a graph begins. So the step fits where, for every i::

    between(i) + sum of saved(j) for j < i  +  peak(i)  +  gradients left by j > i   <=   budget

A graph becomes known when it is first called: it gets a first plan for what the graphs before it leave. Where that does not
suffice, the step goes on with the lowest plan that the graph has (said in the log). After a step with first plans, and after
one in which the inequality did not hold (a graph that is known ran a second time, or at another shape, before the backward
pass), all graphs are planned together (``lowtide.sharing``): only then is there a search, once for all of them. A budget in
percent grows with the graphs that are known, so where Dynamo says that more will come, the first cannot fail it either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lowtide.budget import is_percentage, parse_budget
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Costs, keep_all_schedule, simulate
from lowtide.lower import lower
from lowtide.memory.allocators import allocated_bytes
from lowtide.pipeline import FIRST_PLANNER, check_device, make_program_plan, program_costs, share_planners, with_aside
from lowtide.planning import Plan, make_plan
from lowtide.program import Program
from lowtide.runtime.entry import Entry
from lowtide.runtime.model import Rematerialized
from lowtide.runtime.step import ModelCall
from lowtide.settings import Settings, searches
from lowtide.sharing import Assignment, Constraint, Footprint, Member, choose, peak_bytes, sequential_constraints

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class ForwardPass:
    """A forward pass of the current step. ``between_bytes`` were held by no graph when it began, and
    ``backward_between_bytes`` when its backward pass did, as far as that is known. ``gradients`` are those that its backward
    pass leaves, each with whom it is for: the id of a leaf, a forward pass that returned it, or ``None`` where nobody knows."""

    graph: Rematerialized
    entry: Entry
    call: weakref.ref[ModelCall]
    between_bytes: int
    gradients: tuple[tuple[int, int | ForwardPass | None], ...]
    backward_between_bytes: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether it still holds what its backward pass needs."""
        found = self.call()
        return found is not None and found.generator is not None

    @property
    def between(self) -> tuple[int, int]:
        """Bytes held by no graph in its forward and in its backward pass; before that is over, as in the forward pass."""
        backward = self.backward_between_bytes
        return self.between_bytes, self.between_bytes if backward is None else backward


class SharedBudget:
    """The graphs of one ``torch.compile``, which came with this ``options`` object.

    ``ran`` are the forward passes of the current step, in order: a graph may run several times, by different plans, too. What
    waits from earlier steps (a loss that is kept, say) is a part of every step.
    """

    def __init__(self, settings: Settings, options: Mapping[str, Any]) -> None:
        self.settings = settings
        self._options = options, dict(options)
        self.ran: list[ForwardPass] = []
        self.exceeded = False
        self._first_plans = False  # whether the current step runs by one
        self._device = torch.device("cpu")
        self._between_bytes = 0
        self._known: dict[Entry, tuple[Member, Footprint]] = {}  # what each takes by its plan
        self._level_bytes: int | None = None  # when the latest forward pass had ended

    def belongs_to(self, options: Mapping[str, Any]) -> bool:
        """Whether this is the very object, as it was."""
        known, contents = self._options
        return known is options and contents == options

    def enter(self, device: torch.device) -> None:
        """A graph is about to run: in a new step where most of what ran waits no more for its backward pass."""
        self._device = device
        level = allocated_bytes(device)
        pending = [one for one in self.ran if one.is_pending]
        if 2 * len(pending) <= len(self.ran):
            if self.exceeded or self._first_plans or not self._fits():
                self._replan()
            self._between_bytes = 0
            for one in pending:
                one.backward_between_bytes = None
        elif level is not None and self._level_bytes is not None:
            self._between_bytes += level - self._level_bytes
        self.ran = pending

    def add(self, graph: Rematerialized, entry: Entry, inputs: Sequence[torch.Tensor], call: ModelCall | None) -> None:
        """``graph`` ran by ``entry``."""
        if call is not None:
            gradients = tuple(self._gradients(entry, inputs))
            one = ForwardPass(graph, entry, weakref.ref(call), max(self._between_bytes, 0), gradients)
            call.on_backward = functools.partial(self._measure_between, one)
            self.ran.append(one)
        self._level_bytes = allocated_bytes(self._device)

    def _measure_between(self, one: ForwardPass) -> None:
        """Its backward pass is about to begin: what is held by nobody that the plans know of?"""
        level = allocated_bytes(self._device)
        if level is None or self._level_bytes is None or one not in self.ran or len(self.ran) < 2:
            return
        place = self.ran.index(one)
        (member, _), *later = map(self._member, self.ran[place:])
        expected = left_gradient_bytes(self.ran, sums=False)[place] + member.arriving_bytes
        released = sum(taken.saved_bytes for _, taken in later)
        found = max(self._between_bytes, 0) + level - self._level_bytes + released - expected
        one.backward_between_bytes = max(found, one.backward_between_bytes or 0)

    def _member(self, one: ForwardPass) -> tuple[Member, Footprint]:
        """The program of a pass, and what it takes by its plan."""
        entry = one.entry
        if entry not in self._known:
            member = Member(entry.program, entry.plan.costs, outputs_held=True)
            self._known[entry] = member, member.footprint(entry.plan.schedule)
        return self._known[entry]

    def plan(self, program: Program, replaced: Entry | None, more_follow: bool) -> Plan:
        """A plan for what the forward passes before this one, and code between them, leave of the budget; in the place of
        ``replaced``, where there is one. ``more_follow``: other graphs will run after it."""
        earlier, between = self._before(replaced)
        costs = program_costs(program)
        known = list(map(self._member, earlier))
        members = [*(member for member, _ in known), Member(program, costs, outputs_held=True)]
        bases = [*(one.between for one in earlier), (between, between)]
        constraints = sequential_constraints(range(len(members)), bases, [*left_gradient_bytes(earlier), 0])
        budget, reserve = self._budget(members, constraints)
        check_device(program, budget + reserve)
        room = budget - between - sum(taken.saved_bytes for _, taken in known)
        try:
            return self._planned(program, costs, max(room, 1))
        except InfeasibleBudgetError as error:
            if not earlier and not (more_follow and is_percentage(self.settings.budget)):
                raise with_aside(error, reserve) from None
            _LOG.warning(
                "graph %d of the step needs %d bytes and has %d left: this step may exceed the budget; all are replanned",
                len(members), error.minimum_bytes, room,
            )  # fmt: skip
            self.exceeded = True
            return self._planned(program, costs, error.minimum_bytes)

    def _before(self, replaced: Entry | None) -> tuple[list[ForwardPass], int]:
        """What ran before ``replaced``, or before now, and what code between held then."""
        for place, one in enumerate(self.ran):
            if one.entry is replaced:
                return self.ran[:place], one.between_bytes
        return self.ran, max(self._between_bytes, 0)

    def _planned(self, program: Program, costs: Costs, budget: int) -> Plan:
        settings = dataclasses.replace(self.settings, budget=budget, reserve=0)
        if searches(self.settings.planner):
            with contextlib.suppress(InfeasibleBudgetError):
                first = dataclasses.replace(settings, planner=FIRST_PLANNER)
                plan = make_program_plan(program, first, costs=costs)
                self._first_plans = self._first_plans or plan.overhead > 0
                return plan
        return make_program_plan(program, settings, costs=costs)

    def _gradients(
        self, entry: Entry, inputs: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, int | ForwardPass | None]]:
        """See ``ForwardPass``."""
        makers = {id(call): one for one in self.ran if (call := one.call()) is not None}
        graph, sizes = entry.program.graph, entry.plan.costs.storage_bytes
        for position, value in entry.program.gradients:
            made_by = inputs[position].grad_fn
            owner = id(inputs[position]) if made_by is None else makers.get(id(getattr(made_by, "call", None)))
            yield int(sizes[graph.values[value].storage]), owner

    def _fits(self) -> bool:
        """Whether what ran stayed within the budget together."""
        if len(self.ran) < 2:
            return True
        constraints = self._constraints(range(len(self.ran)))
        members, taken = zip(*map(self._member, self.ran), strict=True)
        budget, _ = self._budget(members, constraints)
        over = peak_bytes(constraints, taken) - budget
        if over > 0:
            _LOG.warning(
                "the %d graphs of the step exceeded the budget of %d bytes by %d (code between them held up to %d): all are "
                "replanned",
                len(self.ran), budget, over, max(max(one.between) for one in self.ran),
            )  # fmt: skip
        return over <= 0

    def _constraints(self, order: Sequence[int]) -> list[Constraint]:
        """Of what ran, by members in this order."""
        return sequential_constraints(order, [one.between for one in self.ran], left_gradient_bytes(self.ran))

    def _replan(self) -> None:
        """Plan all that ran in the last step together."""
        self.exceeded = self._first_plans = False
        members = {one.entry: self._member(one)[0] for one in self.ran}
        self._known.clear()
        if not self.ran:  # the step was broken off
            return
        entries = list(members)
        constraints = self._constraints([entries.index(one.entry) for one in self.ran])
        budget, reserve = self._budget([*members.values()], constraints)
        settings = dataclasses.replace(self.settings, budget=budget, reserve=0)
        try:
            chosen = choose([*members.values()], constraints, budget, *share_planners(settings))
        except InfeasibleBudgetError as error:
            between = max(max(one.between) for one in self.ran)
            held = f", {between} of them for code between them" if between else ""
            own = InfeasibleBudgetError(
                f"the {len(self.ran)} graphs of the step need {error.minimum_bytes} bytes together{held}, more than the "
                f"budget of {budget}; raise it, or avoid the graph breaks.",
                minimum_bytes=error.minimum_bytes,
                budget_bytes=budget,
            )
            raise with_aside(own, reserve) from None
        plans = dict(zip(entries, map(_plan_alone, chosen, members.values()), strict=True))
        for graph in dict.fromkeys(one.graph for one in self.ran):
            for known in graph.entries.values():
                known[:] = [_with_plan(entry, plans.get(entry)) for entry in known]
                for entry in known:
                    entry.for_masks.clear()
                    entry.for_masks[entry.program.mask] = entry

    def _budget(self, members: Sequence[Member], constraints: Sequence[Constraint]) -> tuple[int, int]:
        """The bytes that the graphs share, and those that are reserved; a percentage is of the peak of the graphs together
        without recomputation."""
        assert self.settings.budget is not None
        keep_all = peak_bytes(constraints, [member.keep_all for member in members])
        reserve = parse_budget(self.settings.reserve, keep_all, what="reserve") if self.settings.reserve else 0
        return parse_budget(self.settings.budget, keep_all) - reserve, reserve


def _with_plan(entry: Entry, plan: Plan | None) -> Entry:
    """The entry run by ``plan``, or as it was."""
    return dataclasses.replace(entry, plan=plan, lowered=lower(entry.program, plan.schedule)) if plan else entry


def _plan_alone(chosen: Assignment, member: Member) -> Plan:
    """The plan of an assignment, which was made with room for others, as one of the graph alone."""
    graph, costs = member.program.graph, member.costs
    keep_all = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    if chosen.plan is None:
        return make_plan(graph, costs, budget=keep_all, planner="keep-all")
    peak = simulate(graph, costs, chosen.plan.schedule).peak_bytes
    return dataclasses.replace(
        chosen.plan, costs=costs, peak_bytes=peak, unconstrained_peak_bytes=keep_all, lower_bound_ns=None
    )


def left_gradient_bytes(ran: Sequence[ForwardPass], sums: bool = True) -> list[int]:
    """For each of ``ran``, bytes of the gradients that those after it have left when its backward pass begins; with ``sums``,
    also of the sum where it adds to one."""
    places: dict[object, int] = {one: place for place, one in enumerate(ran)}
    left, staying, leaves = [0] * len(ran), 0, set[object]()
    waiting = [0] * len(ran)  # for what this one returned
    for place in reversed(range(len(ran))):
        left[place] = staying + sum(waiting[:place])
        if sums:
            left[place] += max((nbytes for nbytes, owner in ran[place].gradients if owner in leaves), default=0)
        for nbytes, owner in ran[place].gradients:
            if owner in places:
                waiting[places[owner]] += nbytes
            elif owner not in leaves:
                staying += nbytes
                if isinstance(owner, int):
                    leaves.add(owner)
    return left

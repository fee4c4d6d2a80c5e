"""One budget for several graphs of a step.

Graphs run in order in the forward pass and in reverse in the backward pass. While graph i runs, the graphs before it
hold what they saved and what they returned, and the graphs after it have left gradients behind. So the step fits where, for
every i::

    sum of held(j) for j < i  +  peak(i)  +  sum of gradients(j) for j > i   <=   budget

A graph becomes known when it is first called: it gets what the graphs before it leave. Where that does not suffice, or the
inequality fails for another graph, the step goes on with the lowest plan there is (said in the log), and all graphs are
planned together before the next (also where a graph that is known runs a second time, or at another shape, before the backward
pass): each at the same share of the way from its lowest peak to its peak without recomputation, the
largest share with which the step fits. A budget in percent grows with the graphs that are known, so where Dynamo says that
more will come, the first cannot fail it either.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.budget import is_percentage, parse_budget
from lowtide.capture import Program
from lowtide.capture.results import GradientMask
from lowtide.errors import InfeasibleBudgetError, NoGradientError
from lowtide.ir import Compute, Costs, Free, Schedule, keep_all_schedule, simulate
from lowtide.ir.simulator import owned_storages
from lowtide.lower import lower
from lowtide.pipeline import Settings, check_device, fused, program_costs, with_aside
from lowtide.planning import Plan, make_plan
from lowtide.runtime.model import Entry, Rematerialized, Sample
from lowtide.runtime.step import ModelCall

_LOG = logging.getLogger(__name__)
_HALVINGS = 5


@dataclass(frozen=True, slots=True)
class Extent:
    """What one graph needs of the step's memory: at its peak, between its passes, and after them."""

    peak_bytes: int
    held_bytes: int
    gradient_bytes: int


def extent(program: Program, costs: Costs, schedule: Schedule) -> Extent:
    sizes = costs.storage_bytes.tolist()
    owned = owned_storages(program.graph)
    live: set[int] = set()
    for step in schedule.steps[: schedule.boundary]:
        if isinstance(step, Compute):
            live.update(owned[step.op])
        elif isinstance(step, Free):
            live.discard(step.storage)
    gradients = {program.graph.values[value].storage for _, value in program.gradients}
    peak = simulate(program.graph, costs, schedule).peak_bytes
    return Extent(peak, sum(sizes[s] for s in live), sum(sizes[s] for s in gradients))


def step_peak(extents: Sequence[Extent]) -> int:
    """The largest left side of the inequality above."""
    held, after, peak = 0, sum(each.gradient_bytes for each in extents), 0
    for each in extents:
        after -= each.gradient_bytes
        peak = max(peak, held + each.peak_bytes + after)
        held += each.held_bytes
    return peak


@dataclass(frozen=True, slots=True)
class Ran:
    """A forward pass of the current step."""

    graph: SharingGraph
    entry: Entry
    call: weakref.ref[ModelCall]

    @property
    def waits(self) -> bool:
        """Whether it still holds what its backward pass needs."""
        found = self.call()
        return found is not None and found.generator is not None


class SharedBudget:
    """The graphs of one ``torch.compile``. ``ran`` is what ran in the current step, in that order: a graph may run several
    times, by different plans, too. What waits from earlier steps (a loss that is kept, say) is a part of every step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ran: list[Ran] = []
        self.exceeded = False
        self._fitting: set[tuple[Entry, ...]] = set()  # what is known to fit when it runs in this order

    def enter(self) -> None:
        """A graph is about to run: in a new step where most of what ran waits no more for its backward pass."""
        waiting = [one for one in self.ran if one.waits]
        if self.exceeded and 2 * len(waiting) <= len(self.ran):
            self._settle()
        self.ran = waiting

    def add(self, graph: SharingGraph, entry: Entry, call: ModelCall | None) -> None:
        """``graph`` ran by ``entry``."""
        if call is None:
            return
        self.ran.append(Ran(graph, entry, weakref.ref(call)))
        entries = tuple(one.entry for one in self.ran)
        if self.exceeded or len(entries) == 1 or entries in self._fitting:
            return
        if _peak(entries, [entry.plan for entry in entries]) <= self._budget_of(entries)[0]:
            self._fitting.add(entries)
        else:
            _LOG.warning("%d graphs exceed the budget together in this step: all are replanned", len(entries))
            self.exceeded = True

    def plan(self, program: Program, earlier: Sequence[Entry], more: bool) -> Plan:
        """A plan for what ``earlier`` ones, which ran before, leave of the budget; ``more`` graphs will run after it."""
        before = [extent(entry.program, entry.plan.costs, entry.plan.schedule) for entry in earlier]
        costs = program_costs(program)
        budget, reserve = self._budget([*((entry.program, entry.plan.costs) for entry in earlier), (program, costs)])
        check_device(program, budget + reserve)
        left = budget - sum(each.held_bytes for each in before)
        try:
            plan = self._make(program, costs, max(left, 1))
        except InfeasibleBudgetError as error:
            if not before and not (more and is_percentage(self.settings.budget)):
                raise with_aside(error, reserve) from None
            _LOG.warning(
                "graph %d of the step needs %d bytes and has %d left: this step may exceed the budget; all are replanned",
                len(before) + 1, error.minimum_bytes, left,
            )  # fmt: skip
            self.exceeded = True
            plan = self._make(program, costs, error.minimum_bytes)
        self.exceeded |= step_peak([*before, extent(program, costs, plan.schedule)]) > budget
        return plan

    def _settle(self) -> None:
        """Plan all that ran in the last step together."""
        self.exceeded = False
        self._fitting.clear()
        order = [one.entry for one in self.ran]
        entries = list(dict.fromkeys(order))
        lowest = {entry: self._lowest(entry) for entry in entries}
        budget, reserve = self._budget_of(order)
        best = lowest
        needed = _peak(order, [lowest[entry] for entry in order])
        if needed > budget:
            error = InfeasibleBudgetError(
                f"the {len(order)} graphs of the step need {needed} bytes together, more than the budget of {budget}; "
                "raise it, or avoid the graph breaks.",
                minimum_bytes=needed,
                budget_bytes=budget,
            )
            raise with_aside(error, reserve)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            share = (low + high) / 2
            plans = {entry: self._at(entry, lowest[entry], share) for entry in entries}
            if _peak(order, [plans[entry] for entry in order]) <= budget:
                best, low = plans, share
            else:
                high = share
        for graph in dict.fromkeys(one.graph for one in self.ran):
            graph.replan(best)

    def _budget_of(self, entries: Sequence[Entry]) -> tuple[int, int]:
        return self._budget([(entry.program, entry.plan.costs) for entry in entries])

    def _lowest(self, entry: Entry) -> Plan:
        try:
            return self._make(entry.program, entry.plan.costs, 1)
        except InfeasibleBudgetError as error:
            return self._make(entry.program, entry.plan.costs, error.minimum_bytes)

    def _at(self, entry: Entry, lowest: Plan, share: float) -> Plan:
        span = max(lowest.unconstrained_peak_bytes - lowest.peak_bytes, 0)
        return self._make(entry.program, entry.plan.costs, lowest.peak_bytes + int(share * span))

    def _make(self, program: Program, costs: Costs, budget: int) -> Plan:
        return make_plan(program.graph, costs, budget=budget, planner=self.settings.planner, seed=self.settings.seed)

    def _budget(self, programs: Sequence[tuple[Program, Costs]]) -> tuple[int, int]:
        """The bytes that the graphs share, and those that are reserved; a percentage is of the peak of the graphs
        together, without recomputation."""
        assert self.settings.budget is not None
        whole = step_peak([extent(program, costs, keep_all_schedule(program.graph)) for program, costs in programs])
        reserve = parse_budget(self.settings.reserve, whole, what="reserve") if self.settings.reserve else 0
        return parse_budget(self.settings.budget, whole) - reserve, reserve


def _peak(entries: Sequence[Entry], plans: Sequence[Plan]) -> int:
    pairs = zip(entries, plans, strict=True)
    return step_peak([extent(entry.program, plan.costs, plan.schedule) for entry, plan in pairs])


class SharingGraph(Rematerialized):
    """One of Dynamo's graphs, callable as Dynamo calls it."""

    def __init__(self, module: torch.nn.Module, shared: SharedBudget) -> None:
        super().__init__(module, dataclasses.replace(shared.settings))
        self.module = module  # the base class only refers to it
        self.shared = shared
        # Why Dynamo ended the graph: at a break another one follows.
        self.more = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
        self._replaced: Entry | None = None  # by what is being planned in the backward pass
        self.untrained = False  # whether it is a teacher's, say: Dynamo cuts graphs where it must

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.untrained:
            return self.original_forward(*args, **kwargs)
        self.shared.enter()
        try:
            return super().__call__(*args, **kwargs)
        except NoGradientError:
            self.untrained = True
            return self.original_forward(*args, **kwargs)

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = super().run(entry, inputs)
        call = next((getattr(output.grad_fn, "call", None) for output in outputs if output.grad_fn is not None), None)
        self.shared.add(self, entry, call)
        return outputs

    def planned(self, captured: Program, sample: Sample) -> tuple[Program, Plan]:
        program = fused(captured, self.settings)
        earlier = [one.entry for one in self.shared.ran]
        if self._replaced in earlier:
            earlier = earlier[: earlier.index(self._replaced)]
        return program, self.shared.plan(program, earlier, self.more)

    def remake(self, old: Entry, mask: GradientMask) -> Entry:
        """In the backward pass, in the place of what ran in the forward pass."""
        self._replaced = old
        try:
            new = super().remake(old, mask)
        finally:
            self._replaced = None
        self.shared.ran = [dataclasses.replace(one, entry=new) if one.entry is old else one for one in self.shared.ran]
        return new

    def replan(self, plans: Mapping[Entry, Plan]) -> None:
        """Run these by other plans from now on; other signatures are planned when they come."""
        self.entries = {
            key: [_replanned(entry, plans[entry]) for entry in entries if entry in plans]
            for key, entries in self.entries.items()
            if any(entry in plans for entry in entries)
        }
        self.spare.clear()


def _replanned(entry: Entry, plan: Plan) -> Entry:
    return dataclasses.replace(entry, plan=plan, lowered=lower(entry.program, plan.schedule))

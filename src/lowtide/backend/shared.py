"""One budget for several graphs of a step.

Graphs run in order in the forward pass and in reverse in the backward pass. While graph i runs, the graphs before it
hold what they saved and what they returned, and the graphs after it have left gradients behind: those of parameters stay (one
per parameter, however many graphs read it), those of what an earlier graph returned stay until it takes them. Python code
between the graphs may hold memory, too; that is measured, where a pass of a graph begins. So the step fits where, for every i::

    between(i) + sum of saved(j) for j < i  +  peak(i)  +  gradients left by j > i   <=   budget

A graph becomes known when it is first called: it gets what the graphs before it leave. Where that does not suffice, the step
goes on with the lowest plan that the graph has (said in the log). After such a step, and after one in which the inequality did
not hold (a graph that is known ran a second time, or at another shape, before the backward pass), all graphs are planned
together (``lowtide.sharing``). A budget in percent grows with the graphs that are known, so where Dynamo says that more will
come, the first cannot fail it either.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from lowtide.ir import Costs, keep_all_schedule, simulate
from lowtide.lower import lower
from lowtide.pipeline import Settings, check_device, fused, make_program_plan, program_costs, with_aside
from lowtide.planning import Plan, make_plan
from lowtide.runtime.meter import allocated_bytes
from lowtide.runtime.model import Entry, Rematerialized, Sample
from lowtide.runtime.step import ModelCall
from lowtide.sharing.choice import Block, Moment, Part, choose, part_of, peak_bytes

_LOG = logging.getLogger(__name__)
_MOST_ORDERS = 64  # kept


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a graph leaves behind in its backward pass: for the leaf with this identity, or, where that is 0, for a result of
    the forward pass with the number ``maker`` (-1: not known whose)."""

    nbytes: int
    leaf: int
    maker: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A forward pass of the current step. ``between_bytes``: what was held when it began, by no graph."""

    number: int
    graph: SharingGraph
    entry: Entry
    call: weakref.ref[ModelCall]
    between_bytes: int
    gradients: tuple[Gradient, ...]

    @property
    def waits(self) -> bool:
        """Whether it still holds what its backward pass needs."""
        found = self.call()
        return found is not None and found.generator is not None


def left_behind(ran: Sequence[Ran], sums: bool = True) -> list[int]:
    """For each of ``ran``, bytes of the gradients that those after it have left when its backward pass begins; with ``sums``,
    also of the sum where it adds to one."""
    places = {one.number: place for place, one in enumerate(ran)}
    left, staying, leaves = [0] * len(ran), 0, set()
    waiting = [0] * len(ran)  # for what this one returned
    for place in reversed(range(len(ran))):
        left[place] = staying + sum(waiting[:place])
        if sums:
            added_to = (gradient.nbytes for gradient in ran[place].gradients if gradient.leaf in leaves)
            left[place] += max(added_to, default=0)
        for gradient in ran[place].gradients:
            taker = places.get(gradient.maker, -1)
            if taker >= 0:
                waiting[taker] += gradient.nbytes
            elif gradient.leaf not in leaves:
                staying += gradient.nbytes
                leaves.update({gradient.leaf} - {0})
    return left


class SharedBudget:
    """The graphs of one ``torch.compile``. ``ran`` is what ran in the current step, in that order: a graph may run several
    times, by different plans, too. What waits from earlier steps (a loss that is kept, say) is a part of every step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ran: list[Ran] = []
        self.exceeded = False
        self._numbers = itertools.count()
        self._device = torch.device("cpu")
        self._between_bytes = 0
        self._in_backward: dict[int, int] = {}  # the same when the backward pass began, by number
        self._saved_bytes: dict[Entry, int] = {}
        self._level_bytes: int | None = None  # when the latest forward pass had ended
        self._peaks: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}  # by what ran in which order

    def enter(self, device: torch.device) -> None:
        """A graph is about to run: in a new step where most of what ran waits no more for its backward pass."""
        self._device = device
        level = allocated_bytes(device)
        waiting = [one for one in self.ran if one.waits]
        if 2 * len(waiting) <= len(self.ran):
            if self.exceeded or not self._fits():
                self._settle()
            self._between_bytes = 0
            self._in_backward.clear()
        elif level is not None and self._level_bytes is not None:
            self._between_bytes += level - self._level_bytes
        self.ran = waiting

    def add(self, graph: SharingGraph, entry: Entry, inputs: Sequence[torch.Tensor], call: ModelCall | None) -> None:
        """``graph`` ran by ``entry``."""
        if call is not None:
            number, gradients = next(self._numbers), tuple(self._gradients(entry, inputs))
            call.on_backward = functools.partial(self._notice, number)
            self.ran.append(Ran(number, graph, entry, weakref.ref(call), max(self._between_bytes, 0), gradients))
        self._level_bytes = allocated_bytes(self._device)

    def _notice(self, number: int) -> None:
        """A backward pass comes to what ran with this number: what is held by nobody that the plans know of?"""
        level = allocated_bytes(self._device)
        place = next((place for place, one in enumerate(self.ran) if one.number == number), None)
        if level is None or self._level_bytes is None or place is None or len(self.ran) < 2:
            return
        expected = left_behind(self.ran, sums=False)[place] + _block(self.ran[place].entry).arriving_bytes
        released = sum(self._saved(one.entry) for one in self.ran[place + 1 :])
        found = max(self._between_bytes, 0) + level - self._level_bytes + released - expected
        self._in_backward[number] = max(found, self._in_backward.get(number, 0))

    def _saved(self, entry: Entry) -> int:
        if entry not in self._saved_bytes:
            self._saved_bytes[entry] = _part(entry).saved_bytes
        return self._saved_bytes[entry]

    def _between(self, ran: Sequence[Ran]) -> list[int]:
        """What code between the graphs holds at each one's forward and backward pass; of one that is not over, as at the
        forward pass."""
        return [
            held for one in ran for held in (one.between_bytes, self._in_backward.get(one.number, one.between_bytes))
        ]

    def plan(self, program: Program, earlier: Sequence[Ran], between: int, more: bool) -> Plan:
        """A plan for what ``earlier`` ones, which ran before, and code between them leave of the budget; ``more`` graphs will
        run after it."""
        costs = program_costs(program)
        blocks = [*(_block(one.entry) for one in earlier), Block(program, costs, outputs_held=True)]
        held = [*self._between(earlier), between, between]
        around = _moments(range(len(blocks)), held, [*left_behind(earlier), 0])
        budget, reserve = self._budget(peak_bytes(around, [_whole(block) for block in blocks]))
        check_device(program, budget + reserve)
        room = budget - between - sum(self._saved(one.entry) for one in earlier)
        try:
            return self._made(program, costs, max(room, 1))
        except InfeasibleBudgetError as error:
            if not earlier and not (more and is_percentage(self.settings.budget)):
                raise with_aside(error, reserve) from None
            _LOG.warning(
                "graph %d of the step needs %d bytes and has %d left: this step may exceed the budget; all are replanned",
                len(blocks), error.minimum_bytes, room,
            )  # fmt: skip
            self.exceeded = True
            return self._made(program, costs, error.minimum_bytes)

    def before(self, replaced: Entry | None) -> tuple[list[Ran], int]:
        """What ran before the graph that is to be planned, in the place of ``replaced`` where there is one, and what code
        between them holds."""
        for place, one in enumerate(self.ran):
            if one.entry is replaced:
                return self.ran[:place], one.between_bytes
        return self.ran, max(self._between_bytes, 0)

    def _made(self, program: Program, costs: Costs, budget: int) -> Plan:
        return make_program_plan(program, dataclasses.replace(self.settings, budget=budget, reserve=0), costs=costs)

    def _gradients(self, entry: Entry, inputs: Sequence[torch.Tensor]) -> list[Gradient]:
        numbers = {id(call): one.number for one in self.ran if (call := one.call()) is not None}
        graph, sizes = entry.program.graph, entry.plan.costs.storage_bytes
        found = []
        for position, value in entry.program.gradients:
            made_by = inputs[position].grad_fn
            call = getattr(made_by, "call", None)
            maker = -1 if call is None else numbers.get(id(call), -1)
            leaf = id(inputs[position]) if made_by is None else 0
            found.append(Gradient(int(sizes[graph.values[value].storage]), leaf, maker))
        return found

    def _fits(self) -> bool:
        """Whether what ran stayed within the budget together."""
        if len(self.ran) < 2:
            return True
        left = left_behind(self.ran)
        between = self._between(self.ran)
        planned, whole = self._peaks_of_ran(left)
        budget, _ = self._budget(max(map(sum, zip(between, whole, strict=True))))
        over = max(map(sum, zip(between, planned, strict=True))) - budget
        if over > 0:
            _LOG.warning(
                "the %d graphs of the step exceeded the budget of %d bytes by %d (code between them held up to %d): all are "
                "replanned",
                len(left), budget, over, max(between),
            )  # fmt: skip
        return over <= 0

    def _peaks_of_ran(self, left: Sequence[int]) -> tuple[list[int], list[int]]:
        """What the step takes at each pass of ``ran``, by plan and without recomputation, beside what is between."""
        key = (*(one.entry for one in self.ran), *left)
        if key not in self._peaks:
            around = _moments(range(len(left)), [0, 0] * len(left), left)
            planned = [_part(one.entry) for one in self.ran]
            whole = [_whole(_block(one.entry)) for one in self.ran]
            self._peaks[key] = [peak_bytes([m], planned) for m in around], [peak_bytes([m], whole) for m in around]
            while len(self._peaks) > _MOST_ORDERS:
                del self._peaks[next(iter(self._peaks))]
        return self._peaks[key]

    def _settle(self) -> None:
        """Plan all that ran in the last step together."""
        self.exceeded = False
        self._peaks.clear()
        self._saved_bytes.clear()
        if not self.ran:  # the step was broken off
            return
        entries = list(dict.fromkeys(one.entry for one in self.ran))
        blocks = [_block(entry) for entry in entries]
        between = self._between(self.ran)
        around = _moments([entries.index(one.entry) for one in self.ran], between, left_behind(self.ran))
        budget, reserve = self._budget(peak_bytes(around, [_whole(block) for block in blocks]))
        try:
            parts = choose(blocks, around, dataclasses.replace(self.settings, budget=budget, reserve=0), budget)
        except InfeasibleBudgetError as error:
            held = f", {max(between)} of them for code between them" if max(between) else ""
            own = InfeasibleBudgetError(
                f"the {len(self.ran)} graphs of the step need {error.minimum_bytes} bytes together{held}, more than the "
                f"budget of {budget}; raise it, or avoid the graph breaks.",
                minimum_bytes=error.minimum_bytes,
                budget_bytes=budget,
            )
            raise with_aside(own, reserve) from None
        plans = {entry: _plan_of(part, block) for entry, part, block in zip(entries, parts, blocks, strict=True)}
        for graph in dict.fromkeys(one.graph for one in self.ran):
            graph.replan(plans)

    def _budget(self, whole: int) -> tuple[int, int]:
        """The bytes that the graphs share, and those that are reserved; a percentage is of ``whole``, the peak of the graphs
        together without recomputation."""
        assert self.settings.budget is not None
        reserve = parse_budget(self.settings.reserve, whole, what="reserve") if self.settings.reserve else 0
        return parse_budget(self.settings.budget, whole) - reserve, reserve


def _moments(places: Sequence[int], between: Sequence[int], left: Sequence[int]) -> list[Moment]:
    """Of a step in which the blocks at ``places`` run in this order: the forward and the backward pass of each. ``between`` has
    two numbers for each, too."""
    found = []
    for index, place in enumerate(places):
        saved = tuple(places[:index])
        found.append(Moment(between[2 * index], place, False, saved))
        found.append(Moment(between[2 * index + 1] + left[index], place, True, saved))
    return found


def _block(entry: Entry) -> Block:
    return Block(entry.program, entry.plan.costs, outputs_held=True)


def _part(entry: Entry) -> Part:
    return part_of(_block(entry), entry.plan.schedule)


def _whole(block: Block) -> Part:
    """Without recomputation."""
    return part_of(block, keep_all_schedule(block.program.graph))


def _plan_of(part: Part, block: Block) -> Plan:
    """The plan of a part, which was made with room for others, as one of the graph alone."""
    graph, costs = block.program.graph, block.costs
    whole = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    if part.plan is None:
        return make_plan(graph, costs, budget=whole, planner="keep-all")
    peak = simulate(graph, costs, part.plan.schedule).peak_bytes
    return dataclasses.replace(
        part.plan, costs=costs, peak_bytes=peak, unconstrained_peak_bytes=whole, lower_bound_ns=None
    )


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
        self.shared.enter(self._device(args))
        try:
            return super().__call__(*args, **kwargs)
        except NoGradientError:
            self.untrained = True
            return self.original_forward(*args, **kwargs)

    def _device(self, args: Sequence[Any]) -> torch.device:
        tensors = (each for each in (*args, *self.module.parameters()) if isinstance(each, torch.Tensor))
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = super().run(entry, inputs)
        call = next((getattr(output.grad_fn, "call", None) for output in outputs if output.grad_fn is not None), None)
        self.shared.add(self, entry, inputs, call)
        return outputs

    def planned(self, captured: Program, sample: Sample) -> tuple[Program, Plan]:
        program = fused(captured, self.settings)
        earlier, between = self.shared.before(self._replaced)
        return program, self.shared.plan(program, earlier, between, self.more)

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
        """Run these by other plans from now on."""
        self.entries = {
            key: [_replanned(entry, plans[entry]) if entry in plans else entry for entry in entries]
            for key, entries in self.entries.items()
        }
        self.spare.clear()


def _replanned(entry: Entry, plan: Plan) -> Entry:
    return dataclasses.replace(entry, plan=plan, lowered=lower(entry.program, plan.schedule))

"""``max_batch``: planning, turned around. Not the quickest schedule for a batch, but the largest batch for a memory."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.batches.family import SMALL_BATCHES, Family, Member
from lowtide.batches.samples import MakeSample, Samples
from lowtide.batches.verify import measured_peak
from lowtide.budget import is_amount, is_percentage, parse_budget
from lowtide.capture import Captured
from lowtide.capture.refusals import require_module
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.ir import plain_time_ns, simulate
from lowtide.memory.allocators import free_memory
from lowtide.notebook import Shown
from lowtide.planning import Plan, make_plan
from lowtide.program.sizes import program_device
from lowtide.progress import Progress, told
from lowtide.report.tables import fact_lines
from lowtide.settings import Settings
from lowtide.solve import working_set_bound
from lowtide.units import format_bytes, format_percent

_LOG = logging.getLogger(__name__)
_FRACTIONS = 4  # halvings of the share of the peak that the first guess is made from
_FIRST_STEP = 32  # the first step away from a guess is this part of it
_STEP_BACK = 64  # a batch that fails its confirmation is lowered by this part of it
ONE_FORWARD_PASS = 1 / 3


@dataclass(frozen=True, slots=True, eq=False)
class MaxBatch(Shown):
    """The largest batches that train inside ``budget_bytes`` (``total``: of everything, else of the pass alone).

    ``batch_without`` is the largest without lowtide, 0 where not even one sample fits. ``plan`` is the plan for ``batch``, its
    peak and overhead predicted; ``measured_peak_bytes`` that of one real step, ``None`` where the device had no room for it.
    ``limited``: larger batches were not tried.
    """

    batch: int
    batch_without: int
    budget_bytes: int
    total: bool
    plan: Plan
    measured_peak_bytes: int | None
    limited: bool

    @property
    def gain(self) -> float:
        """How many times larger the batch is; infinite where nothing fits without lowtide."""
        return self.batch / self.batch_without if self.batch_without else float("inf")

    @property
    def predicted_peak_bytes(self) -> int:
        """Of a pass of ``batch`` under the plan."""
        return self.plan.peak_bytes

    @property
    def overhead(self) -> float:
        """Extra time of a step at ``batch`` over the same step without recomputation, as a fraction."""
        return self.plan.overhead

    def __str__(self) -> str:
        return "\n".join(fact_lines(self._facts(), indent=""))

    def _heading(self) -> str:
        return "the largest batch"

    def _facts(self) -> dict[str, str]:
        whole = " (the most that was tried)" if self.limited else ""
        found = self.measured_peak_bytes
        measured = "not measured: no room on this device" if found is None else f"measured {format_bytes(found)}"
        kind = "in all" if self.total else "for the pass"
        return {
            "largest batch": f"{self.batch}{whole}",
            "  without": str(self.batch_without),
            "  budget": f"{format_bytes(self.budget_bytes)} {kind}",
            "  peak": f"{format_bytes(self.plan.peak_bytes)} for the pass, {measured}",
            "  overhead": format_percent(self.overhead),
        }


def max_batch(
    make_sample: MakeSample,
    model: nn.Module,
    *,
    total_budget: int | str | None = None,
    budget: int | str | None = None,
    max_overhead: float | None = ONE_FORWARD_PASS,
    planner: str = "auto{effort=1}",
    seed: int = 0,
    limit: int = 1 << 16,
    offload: str | None = None,
    offload_budget: int | str | None = None,
    on_progress: Progress | None = None,
) -> MaxBatch:
    """The largest batch that ``model`` trains with inside a memory budget, with lowtide and without.

    ``make_sample(batch)`` returns ``(args, kwargs)`` of a call with that many samples. ``total_budget`` and ``budget`` are
    those of ``lowtide.rematerialize``, in bytes. ``max_overhead`` is the most extra time that a step may take, as a fraction:
    a third is about one more forward pass, ``None`` is any. ``planner``: a more patient one may find a few percent more, and
    is asked about ten times. Up to ``limit`` samples are tried. ``offload`` and ``offload_budget`` as for
    ``lowtide.rematerialize``: what a pass needs later may move away and back.

    Batches are planned on captured graphs and allocate nothing; the answer is confirmed by a capture of its own and, where
    the device has the memory, by one measured step. The model is left as it is.

    Raises ``InfeasibleBudgetError`` where not even one sample fits, ``PlanError`` for a budget in percent or a ``make_sample``
    that fails.
    """
    require_module(model, "max_batch(make_sample, model)")
    given = budget if budget is not None else total_budget
    if is_percentage(given):
        raise PlanError('max_batch needs a budget in bytes, such as "8GiB": a percentage would grow with the batch.')
    budget_bytes = 0 if given is None else parse_budget(given, None)
    asked: dict[str, Any] = {"offload": offload, "offload_budget": offload_budget, "planner": planner, "seed": seed}
    settings = Settings(budget=budget, total_budget=total_budget, **asked)  # which needs one of both budgets
    if max_overhead is not None and not is_amount(max_overhead):
        raise PlanError(
            f"max_overhead is {max_overhead!r}, but is a fraction from 0 on, such as 0.33, or None for any."
        )
    if limit < 1:
        raise PlanError(f"limit is {limit}, but at least one sample is tried.")
    samples = Samples(make_sample, SMALL_BATCHES[0])
    with told(type(model).__name__, on_progress) as tell:
        family = Family(model, samples, settings, tell)
        return _Search(family, settings, budget_bytes, max_overhead, limit).run()


class _Search:
    def __init__(
        self, family: Family, settings: Settings, budget_bytes: int, max_overhead: float | None, limit: int
    ) -> None:
        self.family, self.settings, self.limit = family, settings, limit
        self.budget_bytes, self.max_overhead = budget_bytes, max_overhead
        self.total = settings.budget is None
        self.plans: list[Plan] = []  # found so far; the schedules of a uniform family hold for every batch

    def run(self) -> MaxBatch:
        without = self._without()
        best = self._confirmed(largest(self._passes, self._guess(max(without, 1)), self.limit), without)
        if best is None:
            raise self._infeasible()
        # Costs measured at a large batch say more about its neighbours than those of small ones do.
        further = largest(self._passes, best.batch, self.limit)
        return self._confirmed(further, without, above=best.batch) or best

    def _confirmed(self, batch: int, without: int, above: int = 0) -> MaxBatch | None:
        """The first batch from ``batch`` down to ``above`` that holds when captured by itself."""
        for lower in _downwards(batch, above):
            captured, member = self.family.captured(lower)
            self.family.refine(member)
            plan = self._solved(member, self._room(member))
            if plan is None and self.family.belongs(member):
                plan = self._found_before(member)
            measured = None if plan is None else self._measured(lower, captured, plan)
            if plan is None:
                _LOG.info("a batch of %d does not hold when captured by itself", lower)
            elif measured is not None and measured > plan.budget_bytes:
                _LOG.warning("a batch of %d takes %d bytes instead of %d", lower, measured, plan.peak_bytes)
            else:
                limited = lower == self.limit
                return MaxBatch(lower, without, self.budget_bytes, self.total, plan, measured, limited)
        return None

    def _room(self, member: Member) -> int:
        """Bytes that a pass may take."""
        return self.budget_bytes - (member.resident_bytes if self.total else 0)

    def _without(self) -> int:
        """The largest batch that fits without recomputation, confirmed on a capture of its own."""

        def fits(member: Member) -> bool:
            return member.unconstrained_bytes <= self._room(member)

        batch = largest(lambda batch: fits(self.family.member(batch)), 1, self.limit)
        return next((lower for lower in _downwards(batch) if fits(self.family.captured(lower)[1])), 0)

    def _guess(self, batch: int) -> int:
        """The share of the peak that is enough for ``batch`` is about enough for others."""
        if not self.family.uniform:
            return batch
        member = self.family.member(batch)
        low, high = 0.0, 1.0
        for _ in range(_FRACTIONS):
            middle = (low + high) / 2
            found = self._solved(member, int(middle * member.unconstrained_bytes))
            low, high = (middle, high) if found is None else (low, middle)

        def fits(batch: int) -> bool:
            other = self.family.member(batch)
            return high * other.unconstrained_bytes <= self._room(other)

        return largest(fits, batch, self.limit)

    def _passes(self, batch: int) -> bool:
        member = self.family.member(batch)
        return (self._found_before(member) or self._solved(member, self._room(member))) is not None

    def _found_before(self, member: Member) -> Plan | None:
        """The latest of the schedules found so far that fits ``member`` too."""
        room, memory = self._room(member), member.costs.second_memory
        capacity = None if memory is None else memory.capacity_bytes
        for plan in reversed(self.plans if self.family.uniform else []):
            result = simulate(member.graph, member.costs, plan.schedule)
            if capacity is not None and result.timing.second_peak_bytes > capacity:
                continue
            if result.peak_bytes <= room and self._quick_enough(member, result.time_ns):
                return Plan.of(member.graph, member.costs, plan.schedule, room, plan.planner, plan.seed)
        return None

    def _solved(self, member: Member, room: int) -> Plan | None:
        """What the planner finds within ``room`` bytes and the greatest overhead."""
        if room < working_set_bound(member.graph, member.costs):
            return None
        settings = self.settings
        try:
            plan = make_plan(member.graph, member.costs, budget=room, planner=settings.planner, seed=settings.seed)
        except InfeasibleBudgetError:
            return None
        self.plans.append(plan)
        return plan if self._quick_enough(member, plan.time_ns) else None

    def _quick_enough(self, member: Member, time_ns: int) -> bool:
        return self.max_overhead is None or time_ns <= (1 + self.max_overhead) * plain_time_ns(
            member.graph, member.costs
        )

    def _measured(self, batch: int, captured: Captured, plan: Plan) -> int | None:
        """The peak of a real step, where the device is real and has the memory."""
        program = captured.program
        device = program_device(program)
        free = free_memory(device)
        inputs = sum(program.metas[value].storage_bytes for value in program.graph.inputs)
        if device.type == "meta" or (free is not None and plan.peak_bytes + inputs > free):
            return None
        return measured_peak(self.family.model, captured, plan, self.family.samples.real(batch))

    def _infeasible(self) -> InfeasibleBudgetError:
        member = self.family.member(1)
        minimum = working_set_bound(member.graph, member.costs) + self.budget_bytes - self._room(member)
        limit = "" if self.max_overhead is None else f" with at most {100 * self.max_overhead:.0f} % more time per step"
        return InfeasibleBudgetError(
            f"not even a batch of 1 trains within {self.budget_bytes} bytes{limit}; no schedule at all needs less than "
            f"{minimum} bytes. Raise the budget or max_overhead, or make the sample smaller.",
            minimum_bytes=minimum,
        )


def _downwards(batch: int, above: int = 0) -> Iterator[int]:
    """The batches to confirm from ``batch`` on, as long as none holds."""
    while batch > above:
        yield batch
        batch -= max(1, batch // _STEP_BACK)


def largest(passes: Callable[[int], bool], guess: int, limit: int) -> int:
    """The largest number from 1 to ``limit`` that passes, 0 where 1 does not; every number below one that passes must pass.

    Steps that double lead away from ``guess``, up or down, until the answer lies between two of them; then halving. So a
    guess of 1 is an exponential search, and a good guess takes a few tests.
    """
    guess = min(max(guess, 1), limit)
    step = max(1, guess // _FIRST_STEP)
    if passes(guess):
        low, high = guess, min(guess + step, limit + 1)
        while high <= limit and passes(high):
            low, high, step = high, min(high + 2 * step, limit + 1), 2 * step
    else:
        low, high = max(guess - step, 0), guess
        while low > 0 and not passes(low):
            low, high, step = max(low - 2 * step, 0), low, 2 * step
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda number: not passes(number))

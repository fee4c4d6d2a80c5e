"""``max_batch``: find the largest batch for a memory budget, instead of the quickest schedule for a batch."""

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
_FRACTIONS = 4  # bisections of the share of the peak, for the first guess
_FIRST_STEP = 32  # the first step away from a guess is 1/32 of it
_STEP_BACK = 64  # a batch that fails its confirmation is lowered by 1/64
ONE_FORWARD_PASS = 1 / 3


@dataclass(frozen=True, slots=True, eq=False)
class MaxBatch(Shown):
    """The largest batches that train inside ``budget_bytes``, which cover everything if ``total``, else the pass alone.

    ``batch_without``: the largest batch without lowtide, 0 if not even one sample fits. ``plan``: the plan for
    ``batch``, with predicted peak and overhead. ``measured_peak_bytes``: the peak of one real step, ``None`` if the
    device had no room for it. ``limited``: larger batches were not tried.
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
        """How many times larger the batch is; infinite if nothing fits without lowtide."""
        return self.batch / self.batch_without if self.batch_without else float("inf")

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of a pass of ``batch`` with the plan."""
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
    """The largest batch with which ``model`` trains inside a memory budget, with lowtide and without.

    ``make_sample(batch)`` returns ``(args, kwargs)`` of a call with that many samples. ``total_budget`` and ``budget``:
    as for ``lowtide.rematerialize``, in bytes. ``max_overhead``: the most extra time that a step may take, as a
    fraction: a third is about one more forward pass, ``None`` is no limit. ``planner``: asked about ten times; a slower
    one may find a few percent more. ``limit``: the largest batch that is tried. ``offload`` and ``offload_budget``: as
    for ``lowtide.rematerialize``; tensors needed later may move away and back.

    Batches are planned on captured graphs, without allocation. The answer is confirmed by its own capture and, if the
    device has the memory, by one measured step. The model is left unchanged. Raises ``InfeasibleBudgetError`` if not
    even one sample fits, and ``PlanError`` for a budget in percent or a ``make_sample`` that fails.
    """
    require_module(model, "max_batch(make_sample, model)")
    given = budget if budget is not None else total_budget
    if is_percentage(given):
        raise PlanError('max_batch needs a budget in bytes, such as "8GiB": a percentage would grow with the batch.')
    budget_bytes = 0 if given is None else parse_budget(given, None)
    asked: dict[str, Any] = {"offload": offload, "offload_budget": offload_budget, "planner": planner, "seed": seed}
    settings = Settings(budget=budget, total_budget=total_budget, **asked)  # raises without a budget
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
        self.plans: list[Plan] = []  # found so far; in a uniform family valid for every batch

    def run(self) -> MaxBatch:
        without = self._without()
        best = self._confirmed(largest(self._passes, self._guess(max(without, 1)), self.limit), without)
        if best is None:
            raise self._infeasible()
        # Costs measured at a large batch predict those of nearby batches better than small ones do.
        further = largest(self._passes, best.batch, self.limit)
        return self._confirmed(further, without, above=best.batch) or best

    def _confirmed(self, batch: int, without: int, above: int = 0) -> MaxBatch | None:
        """The first batch from ``batch`` down to ``above`` that fits when captured itself."""
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
        """The largest batch that fits without recomputation, confirmed by its own capture."""

        def fits(member: Member) -> bool:
            return member.unconstrained_bytes <= self._room(member)

        batch = largest(lambda batch: fits(self.family.member(batch)), 1, self.limit)
        return next((lower for lower in _downwards(batch) if fits(self.family.captured(lower)[1])), 0)

    def _guess(self, batch: int) -> int:
        """A first guess. The share of the peak that suffices for ``batch`` is about enough for other batches."""
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
        """The latest known schedule that fits ``member`` too, as a plan."""
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
        """The planner's plan within ``room`` bytes and the largest overhead, or ``None``."""
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
        """The peak of a real step, if the device exists and has the memory."""
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
    """The batches to try for confirmation, from ``batch`` down to above ``above``."""
    while batch > above:
        yield batch
        batch -= max(1, batch // _STEP_BACK)


def largest(passes: Callable[[int], bool], guess: int, limit: int) -> int:
    """The largest number from 1 to ``limit`` that passes, 0 if 1 does not. All numbers below one that passes must pass.

    Steps away from ``guess`` double, up or down, until the answer lies between two of them; then bisection. A guess of
    1 gives exponential search; a good guess needs few tests.
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

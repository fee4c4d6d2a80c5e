"""What a budget leaves for a forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from lowtide.budget import is_percentage, parse_budget, parse_reserve
from lowtide.cost import analytical_costs
from lowtide.ir import Costs
from lowtide.program import Program
from lowtide.program.sizes import Outside, check_device, outside_of
from lowtide.settings import Settings
from lowtide.sharing.constraints import Constraint, Member, peak_bytes, plain_peak_bytes
from lowtide.sharing.stages import Calls


def outside_pass(program: Program, settings: Settings, model: nn.Module | None) -> Outside:
    """What a total budget covers beside a pass, without the reserve."""
    if settings.budget is not None:
        return Outside()
    states = settings.optimizer_bytes
    return outside_of(program, model, None if states is None else max(states - settings.moved_bytes, 0))


def pass_budget(
    program: Program, settings: Settings, costs: Costs, outside: Outside, granted_bytes: int
) -> tuple[int, Outside]:
    """The bytes for a pass, and the bytes of the given budget that a pass may not use. ``granted_bytes``: what a budget
    in percent gave before; it never shrinks."""
    member = Member(program, costs)
    unconstrained = Calls(member, settings.in_flight).peak_bytes(member.keep_all)
    reserve = parse_reserve(settings.reserve, unconstrained)
    outside = outside._replace(reserved=reserve)
    there = 0 if settings.total_budget is None else outside.bytes + settings.moved_bytes
    total = parse_budget(settings.given, unconstrained + there)
    check_device(program, total)
    least = granted_bytes if is_percentage(settings.given) else 1
    return max(total - outside.bytes, least, 1), outside


@dataclass
class StepBudget:
    """The budget of a step that several programs share.

    ``outside``: bytes of a total budget that are taken. ``granted_bytes``: for a budget in percent, or one that cannot
    be met, what the largest step got. ``fixed``: do not update that from later steps, because modules run again in
    them, so they do not show what plain steps take.
    """

    settings: Settings
    outside: Outside = field(default_factory=Outside)
    granted_bytes: int = 0
    fixed: bool = False
    _is_stretched: bool = False

    def of(self, members: Sequence[Member], constraints: Sequence[Constraint]) -> tuple[int, int]:
        """The bytes that the programs share, and the bytes beside them. A percentage refers to the step's peak without
        plans. 100 % also suffices for plans that keep everything."""
        fixed = self.fixed and self.granted_bytes > 0
        plain = 1 if fixed else plain_peak_bytes(constraints, members)
        settings, granted = self.settings, self.granted_bytes
        reserve = parse_reserve(settings.reserve, plain)
        if settings.total_budget is not None:
            aside = reserve + self.outside.bytes
            return max(parse_budget(settings.total_budget, plain + aside) - aside, granted, 1), aside
        total = parse_budget(settings.given, plain)
        if is_percentage(settings.given) and total >= plain and not fixed:
            total = max(total, peak_bytes(constraints, [member.keep_all for member in members]))
        return max(total - reserve, granted), reserve

    def of_plain(self, peak_bytes: int) -> int:
        """The shared bytes for a step without any planned program, with this peak."""
        return self.of([], [Constraint(peak_bytes, -1, False, ())])[0]

    def stretches(self, needed_bytes: int, budget_bytes: int) -> bool:
        """Whether a budget in percent is stretched to ``needed_bytes``: once, and by at most one percent, since the
        peak of plain steps is not known more precisely."""
        if self._is_stretched or not is_percentage(self.settings.given) or needed_bytes > budget_bytes * 101 // 100:
            return False
        self._is_stretched = True
        return True


def pass_bytes(program: Program, settings: Settings, model: nn.Module, granted_bytes: int) -> int:
    """About the budget of a pass of ``program``; works without measured costs."""
    outside = outside_pass(program, settings, model)
    budget, _ = pass_budget(program, settings, analytical_costs(program), outside, granted_bytes)
    return min(budget, settings.most_bytes or budget)

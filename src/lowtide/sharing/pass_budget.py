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
    """What a total budget counts beside a pass, but for the reserve."""
    if settings.budget is not None:
        return Outside()
    states = settings.optimizer_bytes
    return outside_of(program, model, None if states is None else max(states - settings.moved_bytes, 0))


def pass_budget(
    program: Program, settings: Settings, costs: Costs, outside: Outside, granted_bytes: int
) -> tuple[int, Outside]:
    """Bytes for a pass, and what of the given budget a pass must leave alone."""
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
    """The budget of a step that several programs share. ``outside`` of a total budget are taken. ``granted_bytes``: of one in
    percent, or beyond one that cannot be met, what the step that took most was given. ``fixed``: that is to stay, since the
    latest steps do not tell what plain ones take (modules run again in them)."""

    settings: Settings
    outside: Outside = field(default_factory=Outside)
    granted_bytes: int = 0
    fixed: bool = False
    _is_stretched: bool = False

    def of(self, members: Sequence[Member], constraints: Sequence[Constraint]) -> tuple[int, int]:
        """The bytes that the programs share, and those beside them; a percentage is of the peak of the step without plans. All
        of that are also enough for plans that keep everything."""
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
        """The same bytes, of a step without any program that takes so many."""
        return self.of([], [Constraint(peak_bytes, -1, False, ())])[0]

    def stretches(self, needed_bytes: int, budget_bytes: int) -> bool:
        """Whether one in percent is met by ``needed_bytes``, once, where these are at most a percent more: what plain steps
        take is known no better."""
        if self._is_stretched or not is_percentage(self.settings.given) or needed_bytes > budget_bytes * 101 // 100:
            return False
        self._is_stretched = True
        return True


def pass_bytes(program: Program, settings: Settings, model: nn.Module, granted_bytes: int) -> int:
    """About what the budget allows a pass of ``program``, none of whose operators need be measured."""
    outside = outside_pass(program, settings, model)
    budget, _ = pass_budget(program, settings, analytical_costs(program), outside, granted_bytes)
    return min(budget, settings.most_bytes or budget)

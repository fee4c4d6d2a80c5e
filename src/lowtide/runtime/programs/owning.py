"""Decide whether the programs of a model own the gradients that arrive (``lowtide.program.tangents``), that is, may
free them.

This takes less memory, so less is recomputed. But a backward pass that has freed them cannot run again when memory runs
out (``programs.rescue``). So programs own them only if they take much of the budget, or if the budget is not met
otherwise. Once other code was seen to hold such gradients, no program owns them.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable

from lowtide.capture.trace.patches import replaced
from lowtide.errors import InfeasibleBudgetError
from lowtide.pipeline import FIRST_PLANNER
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.tangents import tangent_bytes, with_own_tangents
from lowtide.runtime.programs.entry import Owner
from lowtide.runtime.programs.fitting import Planned
from lowtide.settings import Settings, searches
from lowtide.sharing.agreement import several_processes
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)
_CHEAP = 0.02  # up to this overhead of a plan, owning is not worthwhile
_LEAST_SHARE = 0.1  # of the budget: smaller gradients are not worth owning

Found = tuple[Program, Plan]


class _Now(enum.Enum):
    UNDECIDED = "no program was planned yet"
    KEPT = "they count to the end, where that fits"
    OWNED = "programs own them"
    HELD = "others hold them"


class Owning:
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._now = _Now.UNDECIDED

    def leave(self) -> None:
        """Other code holds gradients that arrived: no program owns them from now on."""
        name = type(self._owner.model).__name__
        _LOG.info("others hold gradients of the results of %s: its plans count them to the end", name)
        self._now = _Now.HELD
        self._owner.plan_anew()

    def fitted(self, program: Program, fit: Callable[[Planned], Found], planned: Planned) -> Found:
        """What ``fit`` makes of ``planned``, for ``program`` or for its variant that owns arriving gradients. Raises
        ``InfeasibleBudgetError``."""
        if self._now is _Now.HELD:
            return self._held(program, fit, planned)
        if not self._may_own() or with_own_tangents(program) is program:
            return fit(planned)

        def owning(finish: Callable[[Program], Program]) -> Found:
            return planned(lambda one: with_own_tangents(finish(one)))

        if self._now is _Now.UNDECIDED:

            def quick(settings: Settings) -> Plan:
                return self._as(settings, lambda: planned(lambda one: one))[1]

            worth = is_worth_owning(program, self._owner.settings, quick)
            self._now = _Now.OWNED if worth else _Now.KEPT
        if self._now is _Now.OWNED:
            return fit(owning)
        try:
            return fit(planned)
        except InfeasibleBudgetError as error:
            try:
                found = fit(owning)
            except InfeasibleBudgetError as other:
                raise min(other, error, key=lambda one: one.minimum_bytes) from None
            self._now = _Now.OWNED
            self._owner.plan_anew()  # known schedules are for programs that own nothing
            return found

    def _may_own(self) -> bool:
        """Not programs that share a budget, as this covers what all of them hold; and not with several ranks, which
        would have to agree."""
        owner, settings = self._owner, self._owner.settings
        whole = not (owner.shares_budget or settings.arena) and settings.in_flight == 1
        return whole and not several_processes()

    def _held(self, program: Program, fit: Callable[[Planned], Found], planned: Planned) -> Found:
        """Other code holds the gradients. If they do not fit beside the plan, exceed the budget by at most their size,
        with a warning. Raises ``InfeasibleBudgetError`` if more is missing."""
        try:
            return fit(planned)
        except InfeasibleBudgetError as error:
            least = error.minimum_bytes
            if least - error.budget_bytes > tangent_bytes(program):
                raise
            _LOG.warning(
                "others hold gradients of the results of %s (result.backward(gradient), a hook that keeps them), which do not "
                "fit into the budget of %d bytes beside its plan: it takes %d (%s), the least with them. Call backward() on a "
                "loss, or raise the budget.",
                type(self._owner.model).__name__, error.budget_bytes, least, format_bytes(least),
            )  # fmt: skip
        given = self._owner.settings
        if given.total_budget is None:
            raised = dataclasses.replace(given, budget=least)
        else:
            raised = dataclasses.replace(given, total_budget=least)
        return self._as(raised, lambda: fit(planned))

    def _as(self, settings: Settings, fit: Callable[[], Found]) -> Found:
        """Call ``fit`` with other settings."""
        with replaced(self._owner, "settings", settings):
            return fit()


def is_worth_owning(program: Program, settings: Settings, planned: Callable[[Settings], Plan]) -> bool:
    """Whether a plan for ``program`` gains much by owning the gradients, judged by a quick plan that keeps them."""
    if not settings.rescue:
        return True
    if not searches(settings.planner) or settings.compiler != "eager":
        return False
    try:
        plan = planned(dataclasses.replace(settings, planner=FIRST_PLANNER, planning="wait"))
    except InfeasibleBudgetError:
        return True
    return plan.overhead > _CHEAP and tangent_bytes(program) > _LEAST_SHARE * plan.budget_bytes

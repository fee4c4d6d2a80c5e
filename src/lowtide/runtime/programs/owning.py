"""Whether the programs of a model own the gradients that arrive (``lowtide.program.tangents``).

That takes less memory, so less is computed again. But what such a program has let go of is gone: where memory runs out after
that, its backward pass cannot run again (``programs.rescue``). So programs own them where they take much of the budget, or
where it is not met otherwise; and from when others were seen to hold them, no program does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import nn

from lowtide.errors import InfeasibleBudgetError
from lowtide.pipeline import FIRST_PLANNER
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.tangents import tangent_bytes, with_own_tangents
from lowtide.runtime.programs.fitting import Planned
from lowtide.settings import Settings, searches
from lowtide.sharing.agreement import several_processes

_LOG = logging.getLogger(__name__)
_CHEAP = 0.02  # overhead of a plan, up to which nothing is let go of for less
_LEAST_SHARE = 0.1  # of the budget, that is let go of

Found = tuple[Program, Plan]


class Owner(Protocol):
    """The programs of a model. Plans are made as ``settings`` say at that time."""

    settings: Settings
    shares_budget: bool

    @property
    def model(self) -> nn.Module: ...
    def plan_anew(self) -> None: ...


class _Now(enum.Enum):
    UNDECIDED = "no program was planned yet"
    KEPT = "they count to the end, where that fits"
    OWNED = "programs own them"
    HELD = "others hold them"


class Owning:
    """For the programs of ``owner``."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._now = _Now.UNDECIDED

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Others hold gradients that arrived: no program that is planned inside, or later, owns them."""
        name = type(self._owner.model).__name__
        _LOG.info("others hold gradients of the results of %s: its plans count them to the end", name)
        self._now = _Now.HELD
        self._owner.plan_anew()
        try:
            yield
        except InfeasibleBudgetError as error:
            error.add_note(
                "lowtide: the plan so far let go of gradients of the results once they were read, but others hold gradients "
                "(result.backward(gradient), a hook that keeps them). Call backward() on a loss, or raise the budget."
            )
            raise

    def fitted(self, program: Program, fit: Callable[[Planned], Found], planned: Planned) -> Found:
        """What ``fit`` makes of ``planned``, for ``program`` or for the same as the owner of what arrives. Raises
        ``InfeasibleBudgetError``."""
        if not self._may_own() or with_own_tangents(program) is program:
            return fit(planned)

        def owning(finish: Callable[[Program], Program]) -> Found:
            return planned(lambda one: with_own_tangents(finish(one)))

        if self._now is _Now.UNDECIDED:
            worth = is_worth_owning(program, self._owner.settings, functools.partial(self._quickly, planned))
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
            self._owner.plan_anew()  # schedules are no longer those of one program at several sizes
            return found

    def _may_own(self) -> bool:
        """Not programs that share a budget, which is of what all hold together; nor where ranks would have to agree."""
        owner, settings = self._owner, self._owner.settings
        whole = not (owner.shares_budget or settings.arena) and settings.in_flight == 1
        return whole and self._now is not _Now.HELD and not several_processes()

    def _quickly(self, planned: Planned, settings: Settings) -> Plan:
        """What is planned as ``settings`` say."""
        given, self._owner.settings = self._owner.settings, settings
        try:
            return planned(lambda one: one)[1]
        finally:
            self._owner.settings = given


def is_worth_owning(program: Program, settings: Settings, planned: Callable[[Settings], Plan]) -> bool:
    """Whether a plan for ``program`` needs much of what it would let go of, by a quick one that keeps it."""
    if not settings.rescue:
        return True
    if not searches(settings.planner) or settings.compiler != "eager":
        return False
    try:
        plan = planned(dataclasses.replace(settings, planner=FIRST_PLANNER, planning="wait"))
    except InfeasibleBudgetError:
        return True
    return plan.overhead > _CHEAP and tangent_bytes(program) > _LEAST_SHARE * plan.budget_bytes

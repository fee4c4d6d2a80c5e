"""Fit programs with optimizer updates into a budget: with all optimizer states in memory, with some in a second memory
between updates, or without updates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from lowtide.capture.model_state import model_state
from lowtide.capture.python_state.effects.held_inputs import held_tensors
from lowtide.capture.trace.patches import replaced
from lowtide.errors import InfeasibleBudgetError
from lowtide.pipeline import FIRST_PLANNER, Finish
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.runtime.programs.entry import Owner
from lowtide.runtime.updates.optimizer import UpdatingOptimizer
from lowtide.settings import Settings, searches
from lowtide.sharing.agreement import several_processes

_CHEAP = 0.02  # up to this overhead of a plan, no states are moved to lower it
_SHARES = (0.0, 1.0, 0.5)  # shares of the states' bytes to try moving
Planned = Callable[[Finish], tuple[Program, Plan]]


def with_updates(owner: Owner, program: Program, updated: Sequence[int], share: float | None = None) -> Program:
    """``program`` with updates of the flat inputs ``updated``. ``share`` of the states moves; by default the present
    share."""
    optimizer = owner.optimizer
    if optimizer is None:
        return program
    share = _share(optimizer) if share is None else share
    state = model_state(owner.model).tensors
    return optimizer.finish(program, updated, state, held_tensors(owner.model), share)


def fitted(owner: Owner, program: Program, updated: Sequence[int], planned: Planned) -> tuple[Program, Plan]:
    """What ``planned`` finds for ``program`` with updates of the flat inputs ``updated``, or without updates if it does
    not fit with them. Raises ``InfeasibleBudgetError``."""
    optimizer = owner.optimizer
    if optimizer is None:
        return planned(lambda one: one)
    if optimizer.gradients is not None:  # gradients stay in memory if they fit
        with contextlib.suppress(InfeasibleBudgetError):
            return _with_states(owner, optimizer, (), planned)
    try:
        return _with_states(owner, optimizer, updated, planned)
    except InfeasibleBudgetError as error:
        if with_updates(owner, program, updated) is program:
            raise
        try:
            found = planned(lambda one: one)
        except InfeasibleBudgetError as other:
            raise min(error, other, key=lambda one: one.minimum_bytes) from None
        name = type(owner.model).__name__
        optimizer.say(f"with updates between its operators {name} does not fit the budget")
        return found


def _with_states(
    owner: Owner, optimizer: UpdatingOptimizer, updated: Sequence[int], planned: Planned
) -> tuple[Program, Plan]:
    """The plan found with the present share of states in the second memory, else with all of them. For the first
    program, if states can move, a quick search chooses the share."""
    now = _share(optimizer)
    shares = sorted({now, 1.0 if now else 0.0})
    if not now and _may_move(optimizer):
        ranked = [] if owner.entries else _ranked(owner, optimizer, updated, planned)
        shares = ranked or [0.0, 1.0]
    errors = list[InfeasibleBudgetError]()
    for share in shares:
        try:
            found = _planned(owner, _settings(owner, optimizer, share), updated, planned, share)
        except InfeasibleBudgetError as error:
            errors.append(error)
            continue
        if optimizer.states is not None and share != now:
            owner.settings = _settings(owner, optimizer, share)
            optimizer.states.begin(share)
        return found
    raise min(errors, key=lambda one: one.minimum_bytes)


def _ranked(owner: Owner, optimizer: UpdatingOptimizer, updated: Sequence[int], planned: Planned) -> list[float]:
    """The shares of states with which a quick search meets the budget, quickest first."""
    times: dict[float, int] = {}
    for share in _SHARES:
        settings = _settings(owner, optimizer, share)
        if searches(settings.planner):
            settings = dataclasses.replace(settings, planner=FIRST_PLANNER, planning="wait")
        try:
            program, plan = _planned(owner, settings, updated, planned, share)
        except InfeasibleBudgetError:
            if share:
                break  # fewer moved states do not fit either
            continue
        times[share] = plan.time_ns + (0 if program.updated else _transfers_ns(plan, settings.moved_bytes))
        if not share and plan.overhead <= _CHEAP:
            break
    return sorted(times, key=lambda share: times[share])


def _transfers_ns(plan: Plan, nbytes: int) -> int:
    """Time to fetch and store the states in a step after the pass, where little computation hides it."""
    memory = plan.costs.second_memory
    return 0 if memory is None or not nbytes else memory.fetch_ns(nbytes) + memory.offload_ns(nbytes)


def _planned(
    owner: Owner, settings: Settings, updated: Sequence[int], planned: Planned, share: float
) -> tuple[Program, Plan]:
    """What ``planned`` finds with ``settings`` and ``share`` of the states in the second memory."""
    with replaced(owner, "settings", settings):
        return planned(lambda program: with_updates(owner, program, updated, share))


def _share(optimizer: UpdatingOptimizer) -> float:
    """The share of the states that lies in the second memory."""
    return 0.0 if optimizer.states is None else optimizer.states.share


def _may_move(optimizer: UpdatingOptimizer) -> bool:
    """Whether states could move; not with several processes, which would have to agree."""
    return optimizer.states is not None and not several_processes() and optimizer.states.has_room()


def _settings(owner: Owner, optimizer: UpdatingOptimizer, share: float) -> Settings:
    moved = 0 if optimizer.states is None else optimizer.states.movable_bytes(share)
    return dataclasses.replace(owner.settings, moved_bytes=moved)

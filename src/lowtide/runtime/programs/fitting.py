"""Programs with the updates of an optimizer in them, as they fit a budget: with all of its states there, with some in a second
memory between updates, or without updates."""

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

_CHEAP = 0.02  # overhead of a plan, up to which no state moves for less
_SHARES = (0.0, 1.0, 0.5)  # of the bytes of states, that move
Planned = Callable[[Finish], tuple[Program, Plan]]


def with_updates(owner: Owner, program: Program, updated: Sequence[int], share: float | None = None) -> Program:
    """``program`` with updates of the flat inputs ``updated``, ``share`` of the states moving: by default as now."""
    optimizer = owner.optimizer
    if optimizer is None:
        return program
    share = _share(optimizer) if share is None else share
    state = model_state(owner.model).tensors
    return optimizer.finish(program, updated, state, held_tensors(owner.model), share)


def fitted(owner: Owner, program: Program, updated: Sequence[int], planned: Planned) -> tuple[Program, Plan]:
    """What ``planned`` finds for ``program`` with updates of the flat inputs ``updated``; without, where these do not let it
    meet the budget. Raises ``InfeasibleBudgetError``."""
    optimizer = owner.optimizer
    if optimizer is None:
        return planned(lambda one: one)
    if optimizer.gradients is not None:  # which stay, where they can
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
    """What is found with as many states in the second memory as are there already, for all programs, or with all; of the first
    program, where some could be there, with as many as a quick search finds best."""
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
    """The shares of the states with which a quick search meets the budget, the quickest first."""
    times: dict[float, int] = {}
    for share in _SHARES:
        settings = _settings(owner, optimizer, share)
        if searches(settings.planner):
            settings = dataclasses.replace(settings, planner=FIRST_PLANNER, planning="wait")
        try:
            program, plan = _planned(owner, settings, updated, planned, share)
        except InfeasibleBudgetError:
            if share:
                break  # with fewer of them it does not fit either
            continue
        times[share] = plan.time_ns + (0 if program.updated else _transfers_ns(plan, settings.moved_bytes))
        if not share and plan.overhead <= _CHEAP:
            break
    return sorted(times, key=lambda share: times[share])


def _transfers_ns(plan: Plan, nbytes: int) -> int:
    """How long states come and go for a step after the pass, where little is computed beside them."""
    memory = plan.costs.second_memory
    return 0 if memory is None or not nbytes else memory.fetch_ns(nbytes) + memory.offload_ns(nbytes)


def _planned(
    owner: Owner, settings: Settings, updated: Sequence[int], planned: Planned, share: float
) -> tuple[Program, Plan]:
    """What ``planned`` finds as ``settings`` say, with ``share`` of the states in the second memory."""
    with replaced(owner, "settings", settings):
        return planned(lambda program: with_updates(owner, program, updated, share))


def _share(optimizer: UpdatingOptimizer) -> float:
    """How many of the states lie in the second memory."""
    return 0.0 if optimizer.states is None else optimizer.states.share


def _may_move(optimizer: UpdatingOptimizer) -> bool:
    """Whether states could lie there: not of ranks, which would have to agree."""
    return optimizer.states is not None and not several_processes() and optimizer.states.has_room()


def _settings(owner: Owner, optimizer: UpdatingOptimizer, share: float) -> Settings:
    moved = 0 if optimizer.states is None else optimizer.states.movable_bytes(share)
    return dataclasses.replace(owner.settings, moved_bytes=moved)

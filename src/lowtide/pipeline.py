"""Capture, cost, plan: the stages joined up."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture import Captured, Known, capture
from lowtide.capture.convert.chunked_loss import chunk_losses
from lowtide.capture.convert.gradients import split_sums
from lowtide.cost import analytical_costs, measure_costs
from lowtide.cost.collectives import measure_collectives
from lowtide.cost.scaled import Measured, scaled_costs
from lowtide.cost.workspaces import with_generator_states, with_room_between, with_state_transfers
from lowtide.device import interface_of
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Costs, Schedule, keep_all_schedule
from lowtide.offload import with_offload
from lowtide.planning import Plan, plan_from
from lowtide.planning.cache import PlanCache, PlanRequest, enabled
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.program.sizes import Outside, program_device
from lowtide.progress import Progress, report
from lowtide.settings import Settings, searches
from lowtide.sharing import Member, Planning, Share
from lowtide.sharing.agreement import agreed_plan, several_processes
from lowtide.sharing.assignment import as_alone
from lowtide.sharing.pass_budget import outside_pass, pass_budget
from lowtide.sharing.stages import Calls
from lowtide.solve import format_spec, get_planner, working_set_bound
from lowtide.stage_times import stage
from lowtide.version import __version__

_LOG = logging.getLogger(__name__)
Finish = Callable[[Program], Program]
QUICK_SEARCH = "auto{effort=1}"
_FEW_OPS = 100  # up to which the whole search takes about a second
FIRST_PLANNER = "auto{effort=0}"  # for a start
IMPROVABLE = (
    *(format_spec(get_planner(one)) for one in (FIRST_PLANNER, QUICK_SEARCH)),
    "adapted",
)  # plans to search from
_COSTLY = 0.15  # overhead of a plan of kernels, from which operators one by one are planned as well


def captured_program(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    settings: Settings,
    mask: GradientMask | None = None,
    known: Known | None = None,
    terms_from: int | None = None,
) -> Captured:
    """The call operator by operator; with ``compiler="inductor"`` those that ``fused`` takes. ``known``: of the call, say from
    another capture of it; ``terms_from``: gradients of flat inputs from this one on leave as the terms of their sums
    (``capture.convert.gradients``)."""
    if settings.agreed and several_processes():  # a value may be another one on each
        known = dataclasses.replace(known or Known(), expected=None)
    rewrites: list[Callable[[torch.fx.GraphModule], None]] = []
    if settings.compiler != "eager":
        from lowtide.fusion import split_norms

        rewrites.append(split_norms)
        known = dataclasses.replace(known or Known(), scalars=False)  # numbers are written into kernels
    if settings.chunked_loss:
        rewrites.append(functools.partial(chunk_losses, model, part=terms_from == 0))
    if terms_from is not None:
        rewrites.append(functools.partial(split_sums, first=terms_from))

    def rewrite(joint: torch.fx.GraphModule) -> None:
        for each in rewrites:
            each(joint)

    with stage("capture"):
        return capture(model, args, kwargs, mask=mask, rewrite=rewrite, known=known)


def fused(program: Program, settings: Settings) -> Program:
    """The program as it will run: with ``compiler="inductor"`` its chains of cheap operators are compiled kernels, its library
    calls the quickest routines that there are."""
    if settings.compiler == "eager":
        return program
    from lowtide.fusion import autotuned, fuse

    with stage("kernels"):
        kernels = fuse(program)
    if several_processes():
        return kernels  # each process would choose other routines for itself
    with stage("costs"):
        return autotuned(kernels)


def planned_program(
    captured: Captured,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    settings: Settings,
    granted_bytes: int = 0,
    finish: Finish = lambda program: program,
    known: Callable[[Program], Sequence[Schedule]] = lambda program: (),
) -> tuple[Program, Plan]:
    """What is to run for a call that was ``captured``, completed by ``finish``, and its plan: by one of the schedules ``known``
    for it where that fits. Raises ``CaptureError`` and ``InfeasibleBudgetError``.

    Kernels are fixed before a plan is made, and need at once what their operators need one after the other. So where they
    cannot meet the budget, or only by much recomputation, the program is planned operator by operator too, and the quicker
    of the two is taken; not where the operators take longer without any recomputation already.
    """
    program = finish(fused(captured.program, settings))
    answer: Plan | InfeasibleBudgetError
    try:
        answer = make_program_plan(program, settings, model, granted_bytes=granted_bytes, known=known(program))
    except InfeasibleBudgetError as error:
        if settings.compiler == "eager":
            raise
        answer = error
    if isinstance(answer, Plan) and (settings.compiler == "eager" or answer.overhead <= _COSTLY):
        return program, answer
    apart = dataclasses.replace(settings, compiler="eager", budget=answer.budget_bytes, total_budget=None, reserve=0)
    operators = finish(captured_program(model, args, kwargs, apart, captured.program.mask, Known.of(captured)).program)
    if (
        isinstance(answer, Plan)
        and not several_processes()  # each measures for itself, and all must go the same way
        and answer.time_ns <= program_costs(operators).total_time_ns
    ):
        return program, answer
    try:
        other = make_program_plan(operators, apart, model)
    except InfeasibleBudgetError as error:
        if isinstance(answer, Plan):
            return program, answer
        raise min(answer, error.beside(answer.aside_bytes), key=lambda e: e.minimum_bytes) from None
    if isinstance(answer, Plan) and answer.time_ns <= other.time_ns:
        return program, answer
    _LOG.info(
        "within %d bytes %s runs operator by operator: its kernels need more at once",
        other.budget_bytes,
        type(model).__name__,
    )
    return operators, other


def program_costs(program: Program, on_progress: Progress | None = None) -> Costs:
    """Costs of ``program`` on its device: measured, or analytical where the device is ``meta``."""
    with stage("costs"):
        if any(meta.device.type == "meta" for meta in program.metas):
            costs = analytical_costs(program)
        else:
            interface_of(program_device(program)).warm_up()
            costs = measure_costs(program, on_progress=on_progress or report)
    return with_generator_states(program, costs)


def costs_from(program: Program, known: Sequence[Measured]) -> Costs:
    """Costs of ``program`` as they follow from those of its operators at the ``known`` sizes."""
    with stage("costs"):
        return with_generator_states(program, scaled_costs(program, known))


def make_program_plan(
    program: Program,
    settings: Settings,
    model: nn.Module | None = None,
    on_progress: Progress | None = None,
    granted_bytes: int = 0,
    costs: Costs | None = None,
    known: Sequence[Schedule] = (),
) -> Plan:
    """Cost and plan ``program``; among several processes, one for all that ask the same. Raises ``InfeasibleBudgetError``.

    ``known``: schedules of which one is taken, if it fits, without a search. ``costs``: where those of ``program_costs`` are
    known. ``granted_bytes``: what an earlier signature of the model was given, the least that a budget in percent is, so that
    a short last batch may use the memory of a full one.
    """
    outside = outside_pass(program, settings, model)
    if costs is None:
        measure_collectives(program)

    def search(request: PlanRequest) -> Plan:
        return _adapted(request, known) or _found(settings, request, on_progress)

    def make() -> Plan:
        found = program_costs(program, on_progress) if costs is None else costs
        return _within_budget(program, settings, found, outside, granted_bytes, search)

    if settings.agreed and several_processes():
        return agreed_plan(program, (settings, granted_bytes, outside), make)
    return make()


def adapted_plan(
    program: Program,
    settings: Settings,
    model: nn.Module,
    granted_bytes: int,
    known: Sequence[Measured],
    schedules: Sequence[Schedule],
) -> Plan:
    """A plan at once for a program whose operators were measured at the ``known`` sizes: the quickest of the ``schedules`` that
    were found there which fits here too, or else a first plan. Raises ``InfeasibleBudgetError``."""

    def adapt(request: PlanRequest) -> Plan:
        plan = _adapted(request, (keep_all_schedule(program.graph), *schedules))
        return plan.begun() if plan is not None else _first_plan(request) or _searched(request)

    costs, outside = costs_from(program, known), outside_pass(program, settings, model)
    return _within_budget(program, settings, costs, outside, granted_bytes, adapt)


def _adapted(request: PlanRequest, schedules: Sequence[Schedule]) -> Plan | None:
    """By the quickest of ``schedules`` that fits, if there is one."""
    if not schedules:
        return None
    facts: dict[str, Any] = {"budget_bytes": request.budget_bytes, "seed": request.seed, "placed": request.placed}
    return plan_from(request.graph, request.costs, schedules, planner="adapted", **facts)


def _within_budget(
    program: Program,
    settings: Settings,
    costs: Costs,
    outside: Outside,
    granted_bytes: int,
    search: Callable[[PlanRequest], Plan],
) -> Plan:
    """What ``search`` finds for the bytes that are left of the budget for a pass."""
    alone = costs
    costs = with_room_between(program, costs, settings.between_bytes)
    costs = with_offload(costs, settings.offload, settings.offload_budget, program_device(program))
    costs = with_state_transfers(program, costs)
    budget, outside = pass_budget(program, settings, costs, outside, granted_bytes)
    try:
        with stage("search"):
            if settings.in_flight > 1 and settings.beside_bytes is None:
                plan = Calls(Member(program, costs), settings.in_flight).plan(budget, *in_flight_planners(settings))
            else:
                plan = _as_lowered(program, settings, costs, budget, search)
                if settings.beside_bytes is not None:
                    plan = as_alone(plan, Member(program, alone)).among(settings.in_flight, settings.beside_bytes)
    except InfeasibleBudgetError as error:
        raise error.beside(outside.bytes, str(outside)) from None
    return plan if settings.budget is not None else dataclasses.replace(plan, outside=str(outside))


def _as_lowered(
    program: Program, settings: Settings, costs: Costs, budget_bytes: int, search: Callable[[PlanRequest], Plan]
) -> Plan:
    """What ``search`` finds within the budget; where that was lowered to ``settings.most_bytes``, within these, or within the
    least above them that can be met."""
    most = budget_bytes if settings.most_bytes is None else min(budget_bytes, settings.most_bytes)
    try:
        plan = search(plan_request(program, costs, most, settings))
    except InfeasibleBudgetError as error:
        if not most < error.minimum_bytes <= budget_bytes:
            raise
        plan = search(plan_request(program, costs, error.minimum_bytes, settings))
    return plan if most == budget_bytes else dataclasses.replace(plan, lowered_from_bytes=budget_bytes)


def lowered_plan(program: Program, settings: Settings, plan: Plan) -> Plan:
    """In the place of ``plan`` for ``program``, one within ``settings.most_bytes`` or the least above them that can be met.
    Raises ``InfeasibleBudgetError`` where none is known."""
    given = plan.lowered_from_bytes or plan.budget_bytes
    with stage("search"):
        return _as_lowered(program, settings, plan.costs, given, functools.partial(_found, settings))


def plan_request(program: Program, costs: Costs, budget_bytes: int, settings: Settings) -> PlanRequest:
    """What ``settings`` ask of a planner for ``program``."""
    asked = (settings.planner, settings.seed, (__version__, str(torch.__version__)), settings.arena)
    return PlanRequest(program.graph, costs, budget_bytes, *asked)


def _found(settings: Settings, request: PlanRequest, on_progress: Progress | None = None) -> Plan:
    """A first plan, where the search goes on in the background, or the planner's answer."""
    plan = _first_plan(request) if settings.planning == "background" else None
    return _searched(request, on_progress) if plan is None else plan


def _searched(request: PlanRequest, on_progress: Progress | None = None) -> Plan:
    """The planner's answer, or what it was before; a quick one for few operators takes no longer than to look for it."""
    make = functools.partial(request.make, on_progress or report)
    quick = request.planner == FIRST_PLANNER and len(request.graph.ops) <= _FEW_OPS
    return PlanCache().get_or_make(request, make) if enabled() and not quick else make()


def _first_plan(request: PlanRequest) -> Plan | None:
    """What was found for ``request`` before, or else a plan at once that the search goes on from; ``None`` where none is within
    the budget, or the search takes no longer than a process takes to start."""
    if len(request.graph.ops) <= _FEW_OPS or working_set_bound(request.graph, request.costs) > request.budget_bytes:
        return None
    if (known := _kept(request)) is not None:
        return known
    for planner in (FIRST_PLANNER, QUICK_SEARCH):  # the latter meets what the whole search meets
        quick = dataclasses.replace(request, planner=planner)
        with contextlib.suppress(InfeasibleBudgetError):  # the whole search names the least
            return (_kept(quick) or quick.make()).begun()
    return None


def _kept(request: PlanRequest) -> Plan | None:
    return PlanCache().get(request) if enabled() else None


def share_planners(settings: Settings, *, brief: bool) -> tuple[Planning, Planning | None]:
    """The last arguments of ``sharing.choose``: programs planned as ``settings`` say, and by a quick form of its search; both
    are a step quicker where they are to be ``brief``."""
    if not searches(settings.planner):
        return _planning(settings), None
    if brief:
        return _planning(settings, planner=QUICK_SEARCH), _planning(settings, planner=FIRST_PLANNER)
    return _planning(settings), _planning(settings, planner=QUICK_SEARCH)


def in_flight_planners(settings: Settings) -> tuple[Planning, Planning]:
    """The same for stages of a pipeline, and of ``Calls.plan``."""
    own: dict[str, Any] = {"in_flight": 1, "agreed": False, "total_budget": None, "reserve": 0}
    return _planning(settings, **own), _planning(settings, **own, planner=first_form(settings.planner))


def first_form(planner: str) -> str:
    """The planner of first plans, of ``auto`` with whatever options; of others themselves."""
    return FIRST_PLANNER if planner.startswith("auto") else planner


def _planning(settings: Settings, **own: Any) -> Planning:
    def planned(member: Member, share: Share) -> Plan:
        given = {"budget": share.budget_bytes, "between_bytes": share.between_bytes, **own}
        return make_program_plan(member.program, dataclasses.replace(settings, **given), costs=member.costs)

    return planned

"""Capture, costs, plan: the stages combined."""

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
_FEW_OPS = 100  # operators up to which the whole search takes about a second
FIRST_PLANNER = "auto{effort=0}"  # for first plans
IMPROVABLE = (
    *(format_spec(get_planner(one)) for one in (FIRST_PLANNER, QUICK_SEARCH)),
    "adapted",
)  # planners whose plans a search may improve
_COSTLY = 0.15  # overhead of a plan with kernels, above which single operators are planned too


def captured_program(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    settings: Settings,
    mask: GradientMask | None = None,
    known: Known | None = None,
    terms_from: int | None = None,
) -> Captured:
    """Capture the call operator by operator; with ``compiler="inductor"`` in a form for ``fused``. ``known``: what is
    known of the call, from another capture, say. ``terms_from``: from this flat input on, gradients leave as terms of
    their sums (``capture.convert.gradients``)."""
    if settings.agreed and several_processes():  # values may differ between processes
        known = dataclasses.replace(known or Known(), expected=None)
    rewrites: list[Callable[[torch.fx.GraphModule], None]] = []
    if settings.compiler != "eager":
        from lowtide.fusion import split_norms

        rewrites.append(split_norms)
        known = dataclasses.replace(known or Known(), scalars=False)  # kernels contain numbers as constants
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
    """The program that will run: with ``compiler="inductor"``, chains of cheap operators are compiled kernels and
    library calls the quickest routines."""
    if settings.compiler == "eager":
        return program
    from lowtide.fusion import autotuned, fuse

    with stage("kernels"):
        kernels = fuse(program)
    if several_processes():
        return kernels  # processes might choose different routines
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
    """The program to run for a ``captured`` call, completed by ``finish``, and its plan. ``known`` returns schedules to
    use if they fit. Raises ``CaptureError`` and ``InfeasibleBudgetError``.

    Kernels are fixed before a plan is made, and need at once what their operators need one after the other. So if they
    cannot meet the budget, or only with much recomputation, the program is also planned with single operators, and the
    quicker plan is used. This is skipped if the single operators take longer even without recomputation.
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
        and not several_processes()  # their measurements differ, but their choice must not
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
    """Costs of ``program`` on its device: measured, or analytical for ``meta``."""
    with stage("costs"):
        if any(meta.device.type == "meta" for meta in program.metas):
            costs = analytical_costs(program)
        else:
            interface_of(program_device(program)).warm_up()
            costs = measure_costs(program, on_progress=on_progress or report)
    return with_generator_states(program, costs)


def costs_from(program: Program, known: Sequence[Measured]) -> Costs:
    """Costs of ``program``, derived from those of its operators at the ``known`` sizes."""
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
    """Cost and plan ``program``; if several processes ask for the same, one plan for all. Raises
    ``InfeasibleBudgetError``.

    ``known``: schedules of which one is used without a search if it fits. ``costs``: those of ``program_costs``, if
    known. ``granted_bytes``: what an earlier signature of the model got; a budget in percent is at least that, so that
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
    """A quick plan for a program whose operators were measured at the ``known`` sizes: the quickest of the
    ``schedules`` found there that fits here too, else a first plan. Raises ``InfeasibleBudgetError``."""

    def adapt(request: PlanRequest) -> Plan:
        plan = _adapted(request, (keep_all_schedule(program.graph), *schedules))
        return plan.begun() if plan is not None else _first_plan(request) or _searched(request)

    costs, outside = costs_from(program, known), outside_pass(program, settings, model)
    return _within_budget(program, settings, costs, outside, granted_bytes, adapt)


def _adapted(request: PlanRequest, schedules: Sequence[Schedule]) -> Plan | None:
    """A plan with the quickest of ``schedules`` that fits, or ``None``."""
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
    """The plan from ``search`` for the bytes that the budget leaves for a pass."""
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
    """The plan from ``search`` within the budget. If it was lowered to ``settings.most_bytes``: within that, or the
    least that can be met above it."""
    most = budget_bytes if settings.most_bytes is None else min(budget_bytes, settings.most_bytes)
    try:
        plan = search(plan_request(program, costs, most, settings))
    except InfeasibleBudgetError as error:
        if not most < error.minimum_bytes <= budget_bytes:
            raise
        plan = search(plan_request(program, costs, error.minimum_bytes, settings))
    return plan if most == budget_bytes else dataclasses.replace(plan, lowered_from_bytes=budget_bytes)


def lowered_plan(program: Program, settings: Settings, plan: Plan) -> Plan:
    """A plan for ``program`` to replace ``plan``, within ``settings.most_bytes`` or the least that can be met above it.
    Raises ``InfeasibleBudgetError`` if there is none."""
    given = plan.lowered_from_bytes or plan.budget_bytes
    with stage("search"):
        return _as_lowered(program, settings, plan.costs, given, functools.partial(_found, settings))


def plan_request(program: Program, costs: Costs, budget_bytes: int, settings: Settings) -> PlanRequest:
    """The request to a planner for ``program``, by ``settings``."""
    asked = (settings.planner, settings.seed, (__version__, str(torch.__version__)), settings.arena)
    return PlanRequest(program.graph, costs, budget_bytes, *asked)


def _found(settings: Settings, request: PlanRequest, on_progress: Progress | None = None) -> Plan:
    """A first plan, if the search continues in the background, or the planner's answer."""
    plan = _first_plan(request) if settings.planning == "background" else None
    return _searched(request, on_progress) if plan is None else plan


def _searched(request: PlanRequest, on_progress: Progress | None = None) -> Plan:
    """The planner's answer, cached unless a quick planner with few operators is as fast as the cache."""
    make = functools.partial(request.make, on_progress or report)
    quick = request.planner == FIRST_PLANNER and len(request.graph.ops) <= _FEW_OPS
    return PlanCache().get_or_make(request, make) if enabled() and not quick else make()


def _first_plan(request: PlanRequest) -> Plan | None:
    """A cached plan for ``request``, or a quick plan from which the search continues. ``None`` if none fits the budget,
    or the search is faster than the start of a process."""
    if len(request.graph.ops) <= _FEW_OPS or working_set_bound(request.graph, request.costs) > request.budget_bytes:
        return None
    if (known := _kept(request)) is not None:
        return known
    for planner in (FIRST_PLANNER, QUICK_SEARCH):  # QUICK_SEARCH meets all budgets that the whole search meets
        quick = dataclasses.replace(request, planner=planner)
        with contextlib.suppress(InfeasibleBudgetError):  # the whole search then reports the minimum
            return (_kept(quick) or quick.make()).begun()
    return None


def _kept(request: PlanRequest) -> Plan | None:
    return PlanCache().get(request) if enabled() else None


def share_planners(settings: Settings, *, brief: bool) -> tuple[Planning, Planning | None]:
    """The planners for ``sharing.choose``: by ``settings``, and a quicker form for its search. With ``brief``, both are
    one step quicker."""
    if not searches(settings.planner):
        return _planning(settings), None
    if brief:
        return _planning(settings, planner=QUICK_SEARCH), _planning(settings, planner=FIRST_PLANNER)
    return _planning(settings), _planning(settings, planner=QUICK_SEARCH)


def in_flight_planners(settings: Settings) -> tuple[Planning, Planning]:
    """The same for pipeline stages and ``Calls.plan``."""
    own: dict[str, Any] = {"in_flight": 1, "agreed": False, "total_budget": None, "reserve": 0}
    return _planning(settings, **own), _planning(settings, **own, planner=first_form(settings.planner))


def first_form(planner: str) -> str:
    """The planner of first plans: the quick form of ``auto``; other planners are unchanged."""
    return FIRST_PLANNER if planner.startswith("auto") else planner


def _planning(settings: Settings, **own: Any) -> Planning:
    def planned(member: Member, share: Share) -> Plan:
        given = {"budget": share.budget_bytes, "between_bytes": share.between_bytes, **own}
        return make_program_plan(member.program, dataclasses.replace(settings, **given), costs=member.costs)

    return planned

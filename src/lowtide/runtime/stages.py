"""Plan all pipeline stages that a rank holds together, within one budget (``sharing.stages``).

Each stage is captured and measured as if memory were unlimited. Then plans are chosen for all stages, and each stage
gets a share of the budget. Plans made later, for other gradients or sizes, keep to this share.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowtide.budget import parse_budget, parse_reserve
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.pipeline import in_flight_planners
from lowtide.planning import Plan
from lowtide.program.distributed.sharded import is_sharded
from lowtide.program.sizes import check_device
from lowtide.runtime.model import Rematerialized
from lowtide.runtime.programs.entry import exchange, with_plan
from lowtide.settings import Settings
from lowtide.sharing import Assignment, Member, Planning, Share, choose, peak_bytes
from lowtide.sharing.assignment import as_alone, plan_alone
from lowtide.sharing.stages import Pass, left_bytes, most_in_flight, stage_constraints, stage_shares

_FORWARD, _BACKWARD = "F", "B"
_SPLIT = ("I", "W", "OVERLAP_F_B")


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank. Raises ``PlanError`` if ``schedule`` is not a pipeline schedule."""
    found = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not all(isinstance(getattr(stage, "submod", None), nn.Module) for stage in found):
        raise PlanError(
            f"schedule is a {type(schedule).__name__}, not one of torch.distributed.pipelining, such as Schedule1F1B."
        )
    return list(found)


def passes_of(schedule: Any) -> list[Pass]:
    """The passes of this rank's stages, in order. Raises ``PlanError`` if the schedule splits backward passes or does
    not tell the order."""
    stages, name = stages_of(schedule), type(schedule).__name__
    numbers = {stage.stage_index: number for number, stage in enumerate(stages)}
    order = getattr(schedule, "pipeline_order", None) or {}
    actions = [one for one in order.get(stages[0].group_rank, ()) if one is not None]
    kinds = [str(getattr(one.computation_type, "value", one.computation_type)) for one in actions]
    if any(kind in _SPLIT for kind in kinds):
        raise PlanError(f"{name} splits backward passes, which no plan can run; take ScheduleInterleaved1F1B.")
    both = zip(actions, kinds, strict=True)
    found = [(numbers[one.stage_index], kind == _BACKWARD) for one, kind in both if kind in (_FORWARD, _BACKWARD)]
    if not any(backward for _, backward in found):
        raise PlanError(
            f"{name} does not tell in which order it runs forward and backward passes; call rematerialize with in_flight= for "
            "each stage."
        )
    return found


def plan_stages(schedule: Any, samples: Sequence[Sequence[Any]], settings: Settings) -> list[Rematerialized]:
    """The planned forwards of the stages, not yet installed. Raises ``PlanError``, ``InfeasibleBudgetError`` and
    ``CaptureError``."""
    stages, order = stages_of(schedule), passes_of(schedule)
    if len(samples) != len(stages):
        raise PlanError(
            f"there are {len(samples)} samples for {len(stages)} stages; give each stage's micro-batch, in order."
        )
    if any(is_sharded(stage.submod) for stage in stages):
        raise PlanError(
            "ranks that share a stage by FSDP2 must plan alike; call rematerialize with in_flight= for each stage."
        )
    most = most_in_flight(order)
    with contextlib.ExitStack() as stack:
        planned = []
        for number, (stage, sample) in enumerate(zip(stages, samples, strict=True)):
            free = dataclasses.replace(settings, budget="100%", planner="keep-all", reserve=0, in_flight=most[number])
            runtime = Rematerialized(stage.submod, free)
            stack.callback(runtime.end)
            runtime.prepare(received(sample, first=stage.is_first), {})
            planned.append(runtime)
        _share(planned, order, settings)
        stack.pop_all()
    return planned


def received(args: Sequence[Any], *, first: bool) -> list[Any]:
    """The arguments of a stage as it will be called: tensors from another stage require a gradient."""
    sent = [not first and isinstance(one, torch.Tensor) and one.is_floating_point() for one in args]
    return [one.detach().requires_grad_() if is_sent else one for one, is_sent in zip(args, sent, strict=True)]


def _share(planned: Sequence[Rematerialized], order: Sequence[Pass], settings: Settings) -> None:
    """Plan the captured stages within the budget, and set the share of each."""
    entries = [next(iter(runtime.entries.values()))[0] for runtime in planned]
    members = [Member(entry.program, entry.plan.costs) for entry in entries]
    constraints = stage_constraints(order, [left_bytes(member) for member in members])
    whole = peak_bytes(constraints, [member.keep_all for member in members])
    reserve = parse_reserve(settings.reserve, whole)
    budget = parse_budget(settings.given, whole) - reserve
    check_device(entries[0].program, budget)
    planning, quick = in_flight_planners(settings)
    try:
        chosen = choose(members, constraints, budget, planning, quick)
    except InfeasibleBudgetError as error:
        raise error.beside(reserve) from None
    shares = stage_shares(members, constraints, [one.footprint for one in chosen], budget)
    for runtime, entry, member, one, share in zip(planned, entries, members, chosen, shares, strict=True):
        plan = _refined(one, member, share, planning)
        plan = plan.among(runtime.settings.in_flight, budget - plan.budget_bytes)
        exchange(runtime.entries, {entry: with_plan(entry, plan)})
        runtime.settings = dataclasses.replace(
            runtime.settings,
            budget=share.budget_bytes,
            between_bytes=share.between_bytes,
            beside_bytes=budget - share.budget_bytes,
            planner=settings.planner,
        )


def _refined(chosen: Assignment, member: Member, share: Share, planning: Planning) -> Plan:
    """The chosen plan, or a quicker one within the stage's share. (One pass of the chosen plan may exceed the share, if
    fewer passes wait then.)"""
    found = [plan_alone(chosen, member)]
    if found[0].overhead > 0:
        with contextlib.suppress(InfeasibleBudgetError):
            found.append(as_alone(planning(member, share), member))
    best = min(found, key=lambda plan: plan.time_ns)
    return dataclasses.replace(best, budget_bytes=max(share.budget_bytes, best.peak_bytes))

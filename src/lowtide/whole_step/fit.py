"""``fits``: whether a model trains on a device, what takes its memory, and what would make it fit, before anything is
allocated."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.budget import parse_budget, parse_reserve
from lowtide.capture import capture
from lowtide.capture.arguments import flat_arguments
from lowtide.capture.model_state import model_state
from lowtide.capture.refusals import require_module
from lowtide.cost import analytical_costs
from lowtide.cost.analytical import LinkOf
from lowtide.cost.devices import DEVICES, get_device
from lowtide.cost.links import Link
from lowtide.cost.workspaces import with_state_transfers
from lowtide.errors import CostError, InfeasibleBudgetError, PlanError
from lowtide.ir import Costs, Graph, SecondMemory, keep_all_schedule, simulate
from lowtide.ir.costs import check_second_memory
from lowtide.planning import make_plan
from lowtide.program import Program
from lowtide.program.distributed.local import hooked
from lowtide.program.optimizer_state import Optimizer, for_parameters, optimizer_state_bytes
from lowtide.program.sizes import held_bytes
from lowtide.program.tangents import with_own_tangents
from lowtide.progress import Progress, told
from lowtide.runtime.stages import received
from lowtide.sharing import Member
from lowtide.units import format_bytes
from lowtide.whole_step.answer import Fit
from lowtide.whole_step.attention import FusedAttention
from lowtide.whole_step.inside import updated_inside
from lowtide.whole_step.mesh import blocks_of, current_mesh, link_of, parse_links, parse_mesh, pretended, spread
from lowtide.whole_step.ranked import RankedPass, checkpointed
from lowtide.whole_step.stage import Stage, stage_of

_NAMED = re.compile(r"(?P<name>.+?)[-_ ]?(?P<gigabytes>\d+(\.\d+)?)\s*gb", re.IGNORECASE)
_LARGEST = 3  # number of tensors listed
_RESERVE = 10**9  # bytes of a named device for its driver, libraries and display


def fits(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: int | str,
    optimizer: Optimizer = "AdamW",
    reserve: int | str | None = None,
    planner: str = "auto{effort=1}",
    seed: int = 0,
    offload: str | None = None,
    offload_budget: int | str | None = None,
    mesh: str | None = None,
    link: str | None = None,
    stage: int | None = None,
    micro_batches: int | None = None,
    on_progress: Progress | None = None,
) -> Fit:
    """Whether ``model(*args, **kwargs)`` trains on a device, and what takes its memory. Nothing is allocated there, or
    run: the model and its inputs may be on the ``meta`` device.

    ``device``: its memory, in bytes or with a unit (``"24GiB"``), or its name with the advertised gigabytes, such as
    ``"A100-80GB"`` (names: ``lowtide.cost.devices``). A name also determines how fast it is. ``optimizer``: an
    optimizer of the model's parameters, a sequence of them, a class, or the name of a class of ``torch.optim``. Its
    state is taken from a step on tensors without memory. ``reserve``: memory to leave free; default for a named device:
    1 GB for its driver and libraries. With ``offload="cpu"`` the plan may move tensors to the host's memory over the
    named device's link, at most ``offload_budget`` at one time.

    ``mesh``: sizes by dimension, such as ``"dp=8,tp=4"``, of a cluster of such devices, which need not exist. A copy of
    the model is spread over it (``lowtide.whole_step.mesh``), and the answer is for one of its ranks; the arguments are
    those of a rank. ``link``: the link between ranks, or one for each dimension (``"tp=nvlink,dp=infiniband-ndr"``),
    from ``lowtide.cost.links``. For a mesh with ``pp=``, the model is the ``stage`` with this number, counted from 0,
    of a pipeline that runs ``micro_batches`` by 1F1B; the arguments are those of one micro-batch.

    Bytes are counted as an allocator hands them out. Operators' workspaces and times are modelled, not measured. Raises
    ``PlanError`` for an invalid device, optimizer or amount, and the errors of capturing the model.
    """
    require_module(model, "fits")
    name, capacity = _device(device)
    if link is not None and mesh is None:
        raise PlanError("link= is that of a mesh; give mesh=, too.")
    sizes = None if mesh is None else parse_mesh(mesh)
    own = stage_of(sizes or {}, stage, micro_batches)
    if own is not None and offload is not None:
        raise PlanError("offload= does not go with the micro-batches of a pipeline.")
    if own is not None and own.number:
        args = received(args, first=False)
    title = type(model).__name__
    with told(title, on_progress) as tell, contextlib.ExitStack() as stack:
        between = None
        if sizes is not None:
            links = parse_links(link, sizes, name)
            made = stack.enter_context(pretended(sizes)) if current_mesh() is None else current_mesh()
            whole, model = model, spread(model, made)
            optimizer = for_parameters(optimizer, _counterparts(whole, model))
            between = link_of(made, links)
        args, kwargs = hooked(model, args, {} if kwargs is None else kwargs)
        fit, program, costs = _without_plan(model, args, kwargs, device, name, optimizer, between)
        fit = replace(fit, model=title, capacity_bytes=capacity, mesh=mesh or "")
        if own is not None:
            fit = _of_stage(fit, own, Member(program, costs), args, links["pp"])
        if reserve is not None:
            fit = replace(fit, reserve_bytes=parse_reserve(reserve, None))
        if offload is not None:
            costs = replace(costs, second_memory=_host(offload, offload_budget, name, costs))
        planned = functools.partial(_planned, planner=planner, seed=seed, tell=tell)
        fit = planned(fit, program, costs)
        if sizes is not None:
            return replace(fit, passes=_passes(fit, model, Member(program, costs)))
        return fit if fit else _inside(fit, program, model, optimizer, costs, name, planned)


def _counterparts(whole: nn.Module, spread: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Maps the parameters of a model to those of its spread copy."""
    return {parameter: spread.get_parameter(name) for name, parameter in whole.named_parameters()}


def _of_stage(fit: Fit, stage: Stage, member: Member, args: Sequence[Any], link: Link) -> Fit:
    """``fit`` for a pipeline stage without a plan."""
    came = held_bytes(one for one in args if isinstance(one, torch.Tensor) and one.requires_grad)
    stage = stage.holding(member, fit.input_bytes, came, link)
    whole = stage.peak_bytes(member, keep_all_schedule(member.program.graph))
    return replace(fit, stage=stage, pass_bytes=whole, least_bytes=whole)


def _passes(fit: Fit, model: nn.Module, member: Member) -> tuple[tuple[str, RankedPass], ...]:
    """The passes of a rank: without a plan, with checkpointing, and with the plan."""
    graph, costs = member.program.graph, member.costs
    names = {id(module): path for path, module in model.named_modules()}
    every = checkpointed(graph, costs, [names[id(block)] for block in blocks_of(model)])
    schedules = {"without a plan": keep_all_schedule(graph), "with every block checkpointed": every}
    if fit.plan is not None:
        schedules["with the plan"] = fit.plan.schedule
    passes = {how: RankedPass.of(graph, costs, schedule) for how, schedule in schedules.items()}
    if fit.stage is not None:
        taken = {how: fit.stage.peak_bytes(member, schedule) for how, schedule in schedules.items()}
        passes = {how: replace(one, peak_bytes=taken[how]) for how, one in passes.items()}
    return tuple(passes.items())


def _without_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    device: int | str,
    name: str,
    optimizer: Optimizer,
    between: LinkOf | None,
) -> tuple[Fit, Program, Costs]:
    """The memory of a step on a device without a memory limit, with its program and costs."""
    optimizer_name, optimizer_bytes = optimizer_state_bytes(optimizer, model)
    with torch.enable_grad(), contextlib.nullcontext() if name == "auto" else FusedAttention():
        program = with_own_tangents(capture(model, args, kwargs).program)
    graph, costs = program.graph, analytical_costs(program, name, between)
    inputs, _ = flat_arguments(args, kwargs, model_state(model).tensors)
    whole = simulate(graph, costs, keep_all_schedule(graph))
    fit = Fit(
        model=type(model).__name__,
        device=device if isinstance(device, str) else format_bytes(device),
        capacity_bytes=0,
        reserve_bytes=0 if name == "auto" else _RESERVE,
        parameter_bytes=held_bytes(model.parameters()),
        buffer_bytes=held_bytes(model.buffers()),
        input_bytes=held_bytes(inputs),
        optimizer=optimizer_name,
        optimizer_bytes=optimizer_bytes,
        gradient_bytes=sum(
            program.metas[value].storage_bytes for value in graph.outputs if value not in graph.arriving
        ),
        pass_bytes=whole.peak_bytes,
        least_bytes=whole.peak_bytes,
        plan=None,
        largest=_largest(graph, costs, whole.live_at_peak),
        samples=next((len(tensor) for tensor in inputs if tensor.dim()), 1),
    )
    return fit, program, costs


def _inside(
    fit: Fit,
    program: Program,
    model: nn.Module,
    optimizer: Optimizer,
    costs: Costs,
    name: str,
    planned: Callable[[Fit, Program, Costs], Fit],
) -> Fit:
    """``fit`` with updates inside the backward pass, or also with states in the host's memory if possible. Returns the
    first that fits, else the one that lacks least."""
    tried = [fit]
    for moving in (False, True) if costs.second_memory is not None else (False,):
        changed, moved = updated_inside(program, model, optimizer, moving=moving)
        if not changed.updated or (moving and not moved):
            break
        own = replace(analytical_costs(changed, name), second_memory=costs.second_memory)
        other = replace(fit, inside=True, moved_bytes=moved)
        tried.append(planned(other, changed, with_state_transfers(changed, own)))
        if tried[-1]:
            return tried[-1]
    return min(tried, key=lambda one: one.missing_bytes)


def _planned(fit: Fit, program: Program, costs: Costs, planner: str, seed: int, tell: Progress) -> Fit:
    budget = max(fit.room_bytes, 1)
    options: dict[str, Any] = {"planner": planner, "seed": seed, "on_progress": tell}
    try:
        if fit.stage is None:
            plan = make_plan(program.graph, costs, budget=budget, **options)
        else:
            plan = fit.stage.plan(Member(program, costs), budget, **options)
    except InfeasibleBudgetError as error:
        return replace(fit, least_bytes=error.minimum_bytes)
    return replace(fit, plan=plan, least_bytes=plan.peak_bytes + plan.waiting_bytes)


def _host(offload: str, budget: int | str | None, name: str, costs: Costs) -> SecondMemory:
    """The host's memory as seen by a device of the table. Raises ``PlanError``."""
    check_second_memory(offload)
    device = get_device(name)
    if offload != "cpu":
        raise PlanError(f'offload={offload!r} is not modelled; only offload="cpu" is, the memory of the host.')
    if not device.link:
        known = ", ".join(f"{each.name}-..GB" for each in DEVICES.values() if each.link)
        raise PlanError(
            f"offload={offload!r} needs a device whose link to the host is known: give device= one of {known}, with its "
            'gigabytes, such as device="A100-80GB".'
        )
    rate = int(device.bandwidth_share * device.link)
    whole = int(costs.storage_bytes.sum())
    capacity = None if budget is None else parse_budget(budget, whole, what="offload_budget")
    return SecondMemory(rate, rate, device.launch_ns, capacity, name=offload)


def _device(device: int | str) -> tuple[str, int]:
    """The device's name in the table, ``"auto"`` if it has none, and its bytes."""
    found = _NAMED.fullmatch(device.strip()) if isinstance(device, str) else None
    names = ", ".join(f"{name}-..GB" for name in DEVICES if name != "cpu")
    if found is not None and not found["name"].strip().replace(".", "").isdigit():
        try:
            return get_device(found["name"]).name, int(float(found["gigabytes"]) * 10**9)
        except CostError:
            raise PlanError(
                f"device {device!r} is not in the table, which has {names}; give its memory alone, such as "
                f'"{found["gigabytes"]}GB", and times are those of this machine.'
            ) from None
    try:
        return "auto", parse_budget(device, None, what="device memory")
    except PlanError as error:
        raise PlanError(f"{error} A device by its name has the gigabytes beside it: {names}.") from None


def _largest(graph: Graph, costs: Costs, storages: Iterable[int]) -> tuple[tuple[str, int], ...]:
    def name(storage: int) -> str:
        base = graph.storages[storage].base
        op = graph.ops[base or 0]
        return op.target + (f" of {op.module}" if op.module else "")

    sizes = [(int(costs.storage_bytes[storage]), -storage) for storage in storages]
    return tuple((name(-storage), size) for size, storage in sorted(sizes, reverse=True)[:_LARGEST])

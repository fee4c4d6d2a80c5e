"""``fits``: whether a model trains on a device, what takes its memory, and what would make it fit, before anything is
allocated."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from lowtide.budget import parse_budget
from lowtide.capture import capture
from lowtide.capture.capture import flat_arguments
from lowtide.cost import analytical_costs
from lowtide.cost.analytical import LinkOf
from lowtide.cost.devices import DEVICES, get_device
from lowtide.errors import CostError, InfeasibleBudgetError, PlanError
from lowtide.ir import Costs, Graph, SecondMemory, keep_all_schedule, plain_time_ns, simulate
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.ir.second_memory import check_second_memory
from lowtide.notebook import Shown
from lowtide.pipeline import require_module
from lowtide.planning import Plan, make_plan
from lowtide.program.optimizer_state import Optimizer, optimizer_state_bytes
from lowtide.program.sizes import held_bytes
from lowtide.progress import Progress, told
from lowtide.report.tables import fact_lines
from lowtide.report.text import moved_text
from lowtide.units import format_bytes, format_percent
from lowtide.whole_step.attention import FusedAttention
from lowtide.whole_step.mesh import blocks_of, current_mesh, link_of, parse_links, parse_mesh, pretended, spread
from lowtide.whole_step.ranked import RankedPass, checkpointed

_NAMED = re.compile(r"(?P<name>.+?)[-_ ]?(?P<gigabytes>\d+(\.\d+)?)\s*gb", re.IGNORECASE)
_LARGEST = 3  # tensors that are named
_RESERVE = 10**9  # of a named device: what its driver, its libraries and its display take


@dataclass(frozen=True, slots=True, eq=False)
class Fit(Shown):
    """Whether a training step fits ``capacity_bytes``, of which ``reserve_bytes`` are left alone, and what it takes; all bytes.

    ``pass_bytes``: the peak of a forward and backward pass that recomputes nothing, its ``gradient_bytes`` among them.
    ``plan``: a plan for the room that the rest leaves; ``None`` where none was found, and then ``least_bytes`` is the smallest
    peak of a pass that is known. ``largest``: the largest tensors at the peak without a plan. ``samples``: the first size of
    the first input. ``mesh``: what the model is spread over; then all bytes are one rank's, and ``passes`` are its passes by
    how they run. Times are modelled, not measured.
    """

    model: str
    device: str
    capacity_bytes: int
    reserve_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    optimizer: str
    optimizer_bytes: int
    gradient_bytes: int
    pass_bytes: int
    least_bytes: int
    plan: Plan | None
    largest: tuple[tuple[str, int], ...]
    samples: int
    mesh: str = ""
    passes: tuple[tuple[str, RankedPass], ...] = ()

    def __bool__(self) -> bool:
        """Whether it fits, with a plan or without."""
        return self.plan is not None

    @property
    def resident_bytes(self) -> int:
        """What is there outside of the pass."""
        return self.parameter_bytes + self.buffer_bytes + self.input_bytes + self.optimizer_bytes

    @property
    def room_bytes(self) -> int:
        """What is left for the pass."""
        return self.capacity_bytes - self.reserve_bytes - self.resident_bytes

    @property
    def without_bytes(self) -> int:
        """Of the whole step without lowtide, beside what is reserved."""
        return self.resident_bytes + self.pass_bytes

    @property
    def fits_without(self) -> bool:
        return self.pass_bytes <= self.room_bytes

    @property
    def overhead(self) -> float | None:
        """Extra time of a step under the plan, as a fraction; ``None`` where there is none."""
        return None if self.plan is None else self.plan.overhead

    @property
    def missing_bytes(self) -> int:
        """How much more memory the smallest step that is known takes; 0 where it fits."""
        return 0 if self.plan is not None else max(self.least_bytes - self.room_bytes, 1)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, or what would make it fit."""
        if self.fits_without:
            left = self.room_bytes - self.pass_bytes
            return (f"fits as it is; {format_bytes(left)} are left, say for a larger batch (lowtide.max_batch)",)
        if self.plan is not None:
            return (
                f"lowtide.rematerialize(model, ..., budget={self.plan.budget_bytes}) makes it fit, for about "
                f"{_more_time(self.plan.overhead)}",
            )
        return (*self._advice_where_nothing_fits(), f"a device with {format_bytes(self.missing_bytes)} more")

    def _advice_where_nothing_fits(self) -> Iterable[str]:
        activations = self.least_bytes - self.gradient_bytes
        room = self.room_bytes - self.gradient_bytes
        batch = self.samples * room // max(activations, 1)
        if 0 < batch < self.samples:
            yield f"about {batch} samples instead of {self.samples} (lowtide.max_batch finds how many exactly)"
        if self.gradient_bytes >= self.missing_bytes:
            gradients = format_bytes(self.gradient_bytes)
            yield f"perhaps the optimizer in the plan (optimizer=), which lets go of up to {gradients} of gradients on the way"
        if self.optimizer_bytes >= self.missing_bytes:
            yield (
                f"an optimizer that keeps less: the state of {self.optimizer} is {format_bytes(self.optimizer_bytes)}, that of "
                "SGD without momentum nothing"
            )
        if self.parameter_bytes + self.gradient_bytes >= 2 * self.missing_bytes:
            yield "parameters and gradients in half the precision"
        if self.reserve_bytes >= self.missing_bytes:
            yield f"a smaller reserve than {format_bytes(self.reserve_bytes)}, where the device has nothing else to hold"

    def to_json(self) -> dict[str, Any]:
        """Its numbers and words as plain data."""
        apart = ("plan", "largest", "passes")
        numbers = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        return {
            **numbers,
            "fits": bool(self),
            "fits_without": self.fits_without,
            "room_bytes": self.room_bytes,
            "missing_bytes": self.missing_bytes,
            "peak_bytes": None if self.plan is None else self.plan.peak_bytes,
            "overhead": self.overhead,
            "passes": {name: each.to_json() for name, each in self.passes},
            "largest": [{"tensor": name, "bytes": size} for name, size in self.largest],
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        return "\n".join([self._heading(), *fact_lines(self._facts())])

    def _heading(self) -> str:
        verdict = "fits" if self.fits_without else "fits with a plan" if self.plan else "does not fit"
        room = format_bytes(self.capacity_bytes - self.reserve_bytes)
        spread = f", spread over {self.mesh}," if self.mesh else ""
        return f"{self.model}{spread} {verdict} on {self.device}: {format_bytes(self.without_bytes)} without a plan, of {room}"

    def _facts(self) -> Mapping[str, str]:
        least = f", at least {format_bytes(self.least_bytes)} with one" if self.plan is None else ""
        facts = {
            "parameters": format_bytes(self.parameter_bytes),
            "buffers": format_bytes(self.buffer_bytes),
            "inputs": format_bytes(self.input_bytes),
            "optimizer": f"{format_bytes(self.optimizer_bytes)} ({self.optimizer})",
            "gradients": format_bytes(self.gradient_bytes),
            "pass": f"{format_bytes(self.pass_bytes)} without a plan, gradients among them{least}",
            "left for it": format_bytes(max(self.room_bytes, 0)),
        }
        if self.plan is not None:
            peak, overhead = format_bytes(self.plan.peak_bytes), _more_time(self.plan.overhead)
            plain_ns = max(plain_time_ns(self.plan.graph, self.plan.costs), 1)
            bound = _more_time((self.plan.lower_bound_ns or 0) / plain_ns - 1)
            proven = "" if self.plan.lower_bound_ns is None else f", at best {bound}"
            facts["with a plan"] = f"{peak} for the pass, {overhead}{proven}"
            if self.plan.schedule.moves:
                timing = simulate(self.plan.graph, self.plan.costs, self.plan.schedule).timing
                facts["transfers"] = moved_text(timing)
        facts |= {f"pass {name}": str(each) for name, each in self.passes}
        tensors = {
            f"largest tensor {n}": f"{format_bytes(size)} {name}" for n, (name, size) in enumerate(self.largest, 1)
        }
        return facts | tensors | {f"advice {n}": text for n, text in enumerate(self.advice, 1)}


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
    on_progress: Progress | None = None,
) -> Fit:
    """Whether ``model(*args, **kwargs)`` trains on a device, and what takes its memory. Nothing is allocated there, or run: the
    model and its inputs may be on the ``meta`` device.

    ``device``: its memory, in bytes or with a unit (``"24GiB"``), or its name with the gigabytes that it is sold with, such as
    ``"A100-80GB"`` (names: ``lowtide.cost.devices``), which says how quick it is, too. ``optimizer``: one of the model's
    parameters, a class, or the name of a class of ``torch.optim``; its state is that of a step on tensors without memory.
    ``reserve``: what is to be left alone, by default 1 GB of a named device, for its driver and libraries. With
    ``offload="cpu"`` the plan may move tensors to the host's memory by the link that the named device has, at most
    ``offload_budget`` of them at one time.

    ``mesh``: sizes by dimension, such as ``"dp=8,tp=4"``, of a cluster of such devices that is not there: the answer is of one
    of its ranks (``lowtide.whole_step.mesh``; the arguments are those of a rank). The model is spread over it, and stays so.
    ``link``: the link between ranks, or one for each dimension (``"tp=nvlink,dp=infiniband-ndr"``), of ``lowtide.cost.links``.

    The answer counts bytes as an allocator hands them out. Operators' scratch is modelled, not measured, and so is time.
    Raises ``PlanError`` for a device, an optimizer or an amount that makes no sense, and what capturing the model raises.
    """
    require_module(model, "fits")
    name, capacity = _device(device)
    if link is not None and mesh is None:
        raise PlanError("link= is that of a mesh; give mesh=, too.")
    sizes = None if mesh is None else parse_mesh(mesh)
    with told(type(model).__name__, on_progress) as tell, contextlib.ExitStack() as stack:
        between = None
        if sizes is not None:
            links = parse_links(link, sizes, name)
            made = stack.enter_context(pretended(sizes)) if current_mesh() is None else current_mesh()
            spread(model, made)
            between = link_of(made, links)
        fit, graph, costs = _without_plan(model, args, kwargs, device, name, optimizer, between)
        fit = replace(fit, capacity_bytes=capacity, mesh=mesh or "")
        if reserve is not None:
            fit = replace(fit, reserve_bytes=0 if reserve == 0 else parse_budget(reserve, 1, what="reserve"))
        if offload is not None:
            costs = replace(costs, second_memory=_host(offload, offload_budget, name, costs))
        fit = _planned(fit, graph, costs, planner, seed, tell)
        if sizes is None:
            return fit
        names = {id(module): path for path, module in model.named_modules()}
        every = checkpointed(graph, costs, [names[id(block)] for block in blocks_of(model)])
        schedules = {"without a plan": keep_all_schedule(graph), "with every block checkpointed": every}
        if fit.plan is not None:
            schedules["with the plan"] = fit.plan.schedule
        passes = tuple((how, RankedPass.of(graph, costs, schedule)) for how, schedule in schedules.items())
        return replace(fit, passes=passes)


def _without_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    device: int | str,
    name: str,
    optimizer: Optimizer,
    between: LinkOf | None,
) -> tuple[Fit, Graph, Costs]:
    """What a step takes on a device of unlimited memory, and the pass that it makes."""
    optimizer_name, optimizer_bytes = optimizer_state_bytes(optimizer, model)
    with torch.enable_grad(), contextlib.nullcontext() if name == "auto" else FusedAttention():
        program = capture(model, args, kwargs).program
    graph, costs = program.graph, analytical_costs(program, name, between)
    inputs, _ = flat_arguments(args, kwargs)
    whole = simulate(graph, costs, keep_all_schedule(graph))
    arriving = {op.outputs[0] for op in graph.ops if op.target == TANGENT_TARGET}
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
        gradient_bytes=sum(program.metas[value].storage_bytes for value in graph.outputs if value not in arriving),
        pass_bytes=whole.peak_bytes,
        least_bytes=whole.peak_bytes,
        plan=None,
        largest=_largest(graph, costs, whole.live_at_peak),
        samples=next((len(tensor) for tensor in inputs if tensor.dim()), 1),
    )
    return fit, graph, costs


def _more_time(overhead: float) -> str:
    """Less, where collectives are hidden that a pass without a plan waits for."""
    return f"{format_percent(abs(overhead))} {'less' if overhead < 0 else 'more'} time"


def _planned(fit: Fit, graph: Graph, costs: Costs, planner: str, seed: int, tell: Progress) -> Fit:
    try:
        budget = max(fit.room_bytes, 1)
        plan = make_plan(graph, costs, budget=budget, planner=planner, seed=seed, on_progress=tell)
    except InfeasibleBudgetError as error:
        return replace(fit, least_bytes=error.minimum_bytes)
    return replace(fit, plan=plan, least_bytes=plan.peak_bytes)


def _host(offload: str, budget: int | str | None, name: str, costs: Costs) -> SecondMemory:
    """The host's memory as the device in the table sees it. Raises ``PlanError``."""
    check_second_memory(offload)
    device = get_device(name)
    if offload != "cpu" or not device.link:
        known = ", ".join(f"{each.name}-..GB" for each in DEVICES.values() if each.link)
        raise PlanError(
            f'offload={offload!r}: only offload="cpu" is modelled, for a device whose link is known: {known}.'
        )
    rate = int(device.bandwidth_share * device.link)
    whole = int(costs.storage_bytes.sum())
    capacity = None if budget is None else parse_budget(budget, whole, what="offload_budget")
    return SecondMemory(rate, rate, device.launch_ns, capacity, name=offload)


def _device(device: int | str) -> tuple[str, int]:
    """Its name in the table of devices, ``"auto"`` where it has none, and its bytes."""
    found = _NAMED.fullmatch(device.strip()) if isinstance(device, str) else None
    if found is not None and not found["name"].strip().replace(".", "").isdigit():
        try:
            return get_device(found["name"]).name, int(float(found["gigabytes"]) * 10**9)
        except CostError:
            names = ", ".join(f"{name}-..GB" for name in DEVICES if name != "cpu")
            raise PlanError(
                f"device {device!r} is not in the table, which has {names}; give its memory alone, such as "
                f'"{found["gigabytes"]}GB", and times are those of this machine.'
            ) from None
    return "auto", parse_budget(device, 1, what="device memory")


def _largest(graph: Graph, costs: Costs, storages: Iterable[int]) -> tuple[tuple[str, int], ...]:
    def name(storage: int) -> str:
        base = graph.storages[storage].base
        op = graph.ops[base or 0]
        return op.target + (f" of {op.module}" if op.module else "")

    sizes = [(int(costs.storage_bytes[storage]), -storage) for storage in storages]
    return tuple((name(-storage), size) for size, storage in sorted(sizes, reverse=True)[:_LARGEST])
